"""Rotary tables against transformers' formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.models.config_reader import ConfigReader
from penstock.models.rope import rope
from penstock.nn.rope import RotaryTable, cos_sin_table, inverse_frequencies
from penstock.nn.spec import RopeSpec

DIM, MAX = 64, 4096
ORIGINAL = {"original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}
SHORT, LONG = [1.0 + i / 40 for i in range(32)], [1.0 + i * i / 10 for i in range(32)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **ORIGINAL}

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.25},
    {"rope_type": "linear", "factor": 8.0},
    {**LLAMA3, "factor": 8.0},
    {**LLAMA3, "factor": 32.0, "high_freq_factor": 6.0},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "beta_fast": 20.0, "beta_slow": 0.5},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "partial_rotary_factor": 0.5},
    LONGROPE,
    {**LONGROPE, "factor": 16.0},
    {**LONGROPE, "attention_factor": 1.1},
    {
        **LONGROPE,
        "partial_rotary_factor": 0.75,
        "short_factor": SHORT[:24],
        "long_factor": LONG[:24],
    },
]


def make_config(parameters: dict[str, Any], theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX,
        rope_parameters={"rope_theta": theta, **parameters},
    )


def read(config: LlamaConfig) -> RopeSpec:
    return rope(ConfigReader(config.to_dict()), DIM, partial=1.0)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("max_len", [512, 513])
@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: p["rope_type"])
def test_inverse_frequencies(parameters: dict[str, Any], max_len: int, theta: float) -> None:
    config = make_config(parameters, theta)
    kind = parameters["rope_type"]
    if kind == "default":
        want, factor = Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=max_len)
    got, our_factor = inverse_frequencies(read(config), max_len)
    assert our_factor == pytest.approx(factor, rel=1e-12)
    # transformers rounds each exponent to float32, worth ln(theta) units in the last place
    np.testing.assert_allclose(got, want.numpy().astype(np.float64), rtol=2e-6)


@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: p["rope_type"])
def test_table(parameters: dict[str, Any]) -> None:
    config = make_config(parameters, 10000.0)
    default = parameters["rope_type"] == "default"
    module = (Phi3RotaryEmbedding if default else LlamaRotaryEmbedding)(config)
    cos, sin = module(torch.zeros(1), torch.arange(MAX)[None])
    half = cos.shape[-1] // 2
    want = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
    got = cos_sin_table(read(config), MAX)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[:64], want[:64], rtol=0, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * MAX)


def test_one_choice_of_longrope_factors_for_the_whole_table() -> None:
    spec = read(make_config(LONGROPE, 10000.0))
    short, long = cos_sin_table(spec, 512), cos_sin_table(spec, 513)
    assert not torch.allclose(short, long[:512])
    assert torch.equal(cos_sin_table(spec, MAX)[:513], long)


def test_what_is_seen_chooses_them_where_texts_are_longer() -> None:
    spec = read(make_config(LONGROPE, 10000.0))
    assert torch.equal(cos_sin_table(spec, 2048, reach=512)[:512], cos_sin_table(spec, 512))
    assert torch.equal(cos_sin_table(spec, 2048, reach=513)[:513], cos_sin_table(spec, 513))


@pytest.mark.parametrize("reach", [100, 1024, 1500])
def test_far_positions_are_as_near_as_double_precision_has_them(reach: int) -> None:
    """A query and a key turn by their distance, wherever they are."""
    spec, far = RopeSpec(1e4, 32), 1 << 20
    table = cos_sin_table(spec, far, reach).double()
    assert torch.equal(table[:reach].float(), cos_sin_table(spec, reach))
    cos, sin = table.chunk(2, dim=1)
    inv = torch.from_numpy(inverse_frequencies(spec, reach)[0]).float().double()
    for at in (reach, 5000, far - 1):
        by = (cos[at] * cos[at - 64] + sin[at] * sin[at - 64]) - torch.cos(64 * inv)
        assert by.abs().max() < 2e-4 if at - 64 < reach else by.abs().max() < 1e-6


def test_rows_are_on_a_circle() -> None:
    """cos² + sin² is the square of the attention factor."""
    spec = RopeSpec(1e4, 32, kind="yarn", factor=4.0, original_max_position=64)
    table = cos_sin_table(spec, 256)
    radius = inverse_frequencies(spec, 256)[1]
    squares = table[:, :16] ** 2 + table[:, 16:] ** 2
    torch.testing.assert_close(squares, torch.full((256, 16), radius**2), rtol=1e-6, atol=0)


def test_the_table_is_a_buffer() -> None:
    module = RotaryTable(RopeSpec(1e4, 16, interleaved=True), 8)
    assert module.interleaved
    assert module.cos_sin.shape == (8, 16)
    assert list(module.state_dict()) == []
    assert module.cos_sin[0].tolist() == [1.0] * 8 + [0.0] * 8

"""Losses by matrix against the whole model's, and mixtures within their budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.errors import ConfigError
from penstock.models.sources import open_source
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.parts import Parts, bits_per_weight
from penstock.pipeline.sensitivity import choose, measure, num_weights, parse_budget
from penstock.quant import parse_scheme
from penstock.quant.methods import rtn
from tests.models.tiny import Tiny, make_model

SCHEMES = [parse_scheme(name) for name in ("w4a16-g32", "w8a16")]


def test_a_loss_is_the_divergence_of_the_model_with_that_matrix_rounded(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    checkpoint = tiny("llama3-rope")
    found = measure(checkpoint.folder, SCHEMES, calibration)
    assert [c.name for c in found["layers.1.mlp.up"]] == ["w4a16-g32", "w8a16"]
    other = make_model(checkpoint.case)
    for name, parameter in other.named_parameters():
        if name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            parameter.data = rtn.quantize(parameter.data, SCHEMES[0]).dequantize()
    total = 0.0
    with torch.inference_mode():
        for window in calibration.windows:
            tokens = torch.tensor(window)[None]
            p, q = (m(tokens).logits[0].log_softmax(-1) for m in (checkpoint.oracle, other))
            total += float((p.exp() * (p - q)).sum())
    want = total / calibration.num_tokens
    assert found["layers.1.mlp.up"][0].loss == pytest.approx(want, rel=0.02)
    assert all(choices[0].loss > choices[1].loss > 0 for choices in found.values())

    weights = num_weights(checkpoint.folder)
    parts = Parts.of(open_source(checkpoint.folder))
    for budget in ("5bpw", "6.2bpw"):
        mixture = choose(found, budget, SCHEMES, weights)
        shapes = {module: parts.shape(module) for module in mixture}
        bits = sum(bits_per_weight(s, *shapes[m]) * shapes[m][0] * shapes[m][1]
                   for m, s in mixture.items())  # fmt: skip
        assert bits <= float(budget[:-3]) * weights
        assert {s.name for s in mixture.values()} == {"w4a16-g32", "w8a16"}
    losses = {m: {c.name: c.loss for c in choices} for m, choices in found.items()}
    limit = 0.5 * sum(each["w4a16-g32"] for each in losses.values())
    mixture = choose(found, f"{limit:.6f}", SCHEMES, weights)
    assert sum(losses[m][s.name] for m, s in mixture.items()) <= limit
    with pytest.raises(ConfigError, match="The smallest schemes given take"):
        choose(found, "3bpw", SCHEMES, weights)


def test_budgets() -> None:
    assert parse_budget("4.5bpw") == ("bits", 4.5)
    assert parse_budget("0.01") == ("loss", 0.01)
    for wrong in ("", "bpw", "-1", "0", "4.5 bits"):
        with pytest.raises(ConfigError, match="is neither bits a weight"):
            parse_budget(wrong)


def test_bits_count_scales_and_zero_points() -> None:
    for name, bits in (
        ("w4a16-g32", 4.5),
        ("w4a16-g128", 4.125),
        ("w4a16-g128-asym", 4 + 20 / 128),
        ("w8a8", 8 + 32 / 256),
        ("w8a8-tensor", 8 + 32 / (64 * 256)),
        ("nf4", 4.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
    ):
        assert bits_per_weight(parse_scheme(name), 64, 256) == bits
    assert bits_per_weight(None, 64, 256) == 16

"""What a model takes of memory, known before it is loaded, beside what it has once it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, Make

from penstock.config import EngineConfig
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.kernels import native
from penstock.models.load import describe, load_model, weight_bytes
from penstock.runtime import Program
from penstock.runtime.device import CPU, Device
from penstock.runtime.footprint import Footprint, _stand_in, footprint
from penstock.runtime.memory import activation_bytes
from penstock.runtime.plan import fixed_tensors
from penstock.runtime.sizing import layout_of

FORMATS = (None, "w8a8", "w8a16", "w4a8", "w4a16-g64-asym", "fp8", "nf4", "nvfp4")
GPU = Device(torch.device("cuda"), by_triton=True)


def planned(folder: Path, device: Device = CPU, **chosen: Any) -> Footprint:
    return footprint(EngineConfig.of(model=folder, **chosen), device)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_that_are_loaded(tiny: Make, name: str, quantization: str | None) -> None:
    case = tiny(name)
    length = case.case.max_len
    found = describe(case.folder, max_model_len=length, quantization=quantization)
    loaded = load_model(case.folder, max_model_len=length, quantization=quantization)
    held = sum(tensor.nbytes for tensor in fixed_tensors(loaded.model).values())
    empty = found.decoder()
    assert weight_bytes(empty) + sum(table.nbytes for table in empty.buffers()) == held
    chosen = {"max_model_len": length, "quantization": quantization}
    assert planned(case.folder, **chosen).weights == held


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_a_stand_in_needs_the_buffers_of_the_whole(tiny: Make, name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = tiny(name).load(dtype)
        config = EngineConfig.of(model=tiny(name).folder, kv_cache_dtype="auto")
        kv = layout_of(config, loaded).allocate(1)
        whole = Program(loaded.model, kv)
        model = _stand_in(loaded.spec.decoder, loaded.dtype, None)
        part = Program(model, kv)
        for tokens, rows in ((512, 3), (100_000, 64)):
            assert part.reserve(tokens, rows) == whole.reserve(tokens, rows)


def test_config_json_is_enough(tiny: Make, tmp_path: Path) -> None:
    """The same as with random weights; of a folder whose weights are there it takes their form."""
    folder = tiny("qwen3").folder
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    alone = planned(tmp_path, quantization="w4a8")
    beside = planned(folder, quantization="w4a8")
    assert alone.described.source is None and beside.described.source is not None
    assert (alone.weights, alone.workspace) == (beside.weights, beside.workspace)
    assert planned(folder, load_format="dummy", quantization="w4a8").described.source is None
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuch"]}))
    with pytest.raises(UnsupportedModelError, match="NoSuch"):
        planned(tmp_path)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8", "int4", "kivi"])
def test_keys_and_values(tiny: Make, stored: str) -> None:
    folder, loaded = tiny("llama").folder, tiny("llama").load("bfloat16")
    found = planned(folder, dtype="bfloat16", kv_cache_dtype=stored, max_model_len=96)
    layout = layout_of(EngineConfig.of(kv_cache_dtype=stored), replace(loaded, max_model_len=96))
    kv = found.layout.allocate(5 * 3)  # 96 tokens are 3 blocks
    distinct = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in kv for t in p}
    assert found.cache_bytes(5, 96) == found.layout.nbytes(15)
    assert sum(distinct.values()) - found.layout.nbytes(15) in range(4096)  # whole pages
    assert found.layout.bytes_per_block == layout.bytes_per_block
    assert found.total(5, 96) == found.weights + found.workspace + found.cache_bytes(5, 96)
    assert found.kv_bytes_per_token * 32 == layout.bytes_per_block


def test_a_window_keeps_the_last_blocks(tiny: Make) -> None:
    """Window 19: a block that is left, one seen, one entered; and of a prompt the rest."""
    found = planned(tiny("mistral").folder, max_model_len=128, max_num_batched_tokens=64)
    assert (found.horizon.window, found.blocks(5, 32)) == (19, 5)
    assert found.blocks(5, 128) == 5 * 3 + 1
    whole = planned(tiny("llama").folder, max_model_len=128)
    assert (whole.horizon.window, whole.blocks(5, 128)) == (0, 20)


def test_a_smaller_step(tiny: Make) -> None:
    config = EngineConfig.of(model=tiny("llama").folder, max_num_seqs=4)
    few, many, most = (footprint(config, CPU, tokens) for tokens in (64, 512, 1 << 20))
    assert few.workspace < many.workspace < most.workspace == footprint(config, CPU).workspace
    assert few.weights == most.weights and most.step_tokens == 2048


def test_a_gpu_that_is_not_here(tiny: Make) -> None:
    """Rows instead of panels, and what the engine sets aside there."""
    case = tiny("llama")
    config = EngineConfig.of(model=case.folder, max_num_seqs=8)
    found = footprint(config, GPU)
    spec = found.decoder
    assert found.workspace == activation_bytes(spec, 4, config.scheduler) + 2 * (512 << 20)
    assert found.kv_bytes_per_token == 2 * 4 * sum(
        x.attention.num_kv_heads * x.attention.head_dim for x in spec.layers
    )
    for stored in ("int4", "kivi"):
        with pytest.raises(ConfigError, match="is built for CPUs only"):
            footprint(
                EngineConfig.of(model=case.folder, dtype="bfloat16", kv_cache_dtype=stored), GPU
            )
    with pytest.raises(ConfigError, match="built for GPUs"):
        footprint(EngineConfig.of(model=case.folder, quantization="w4a8-g32-blocks"), GPU)

"""Configs and tensors of other kinds than a layout has: a WeightsError each, when found or read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError, ModelError, WeightsError
from penstock.quant import Codes
from penstock.quant.files import METHODS, find_matrices
from tests.quant.files.made import Memory

Tensors = dict[str, Tensor]

FP8: Tensors = {
    "a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
    "a.weight_scale": torch.ones(1),
}
BLOCKS: Tensors = {"a.weight": FP8["a.weight"], "a.weight_scale_inv": torch.ones(1, 1)}
INT4: Tensors = {
    "a.weight_packed": torch.zeros(8, 1, dtype=torch.int32),
    "a.weight_scale": torch.ones(8, 1),
    "a.weight_shape": torch.tensor([8, 8]),
}
NVFP4: Tensors = {
    "a.weight_packed": torch.ones(8, dtype=torch.uint8),
    "a.weight_scale": FP8["a.weight"],
}
GPTQ: Tensors = {
    "a.qweight": torch.zeros(4, 8, dtype=torch.int32),
    "a.qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
    "a.scales": torch.ones(1, 8),
}


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **more}


def compressed(weights: Any, kind: str = "float-quantized", **group: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, **more}


def bitsandbytes(text: bytes | None = None, **state: Any) -> Tensors:
    """NF4 [8, 64] whose scales are nested."""
    whole = {"blocksize": 64, "shape": [8, 64], "quant_type": "nf4", **state}
    return {
        "a.weight": torch.zeros(256, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.zeros(8, dtype=torch.uint8),
        "a.weight.nested_absmax": torch.ones(1),
        "a.weight.nested_quant_map": torch.ones(256),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(text or json.dumps(whole).encode()), dtype=torch.uint8
        ),
    }


TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block"}
ROWS = {"num_bits": 4, "strategy": "channel"}
ZERO = {**ROWS, "symmetric": False}
PACK = "pack-quantized"
BNB = {"quant_method": "bitsandbytes"}

WRONG: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "block of null": (fp8(weight_block_size=[None, 128]), BLOCKS, r"weight_block_size=\[None, 128"),
    "block of text": (fp8(weight_block_size=["x", 128]), BLOCKS, "weight_block_size"),
    "block of 0": (fp8(weight_block_size=[0, 128]), BLOCKS, "weight_block_size"),
    "modules 5": (fp8(modules_to_not_convert=5), FP8, "isn't as fp8 writes it: TypeError"),
    "modules [5]": (fp8(modules_to_not_convert=[5]), FP8, "isn't as fp8 writes it"),
    "1-D": (compressed(TENSOR), {**FP8, "a.weight": FP8["a.weight"][0]}, "it isn't a matrix"),
    "1-D nibbles": (
        compressed({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized"),
        NVFP4,
        "it isn't a matrix",
    ),
    "targets": (compressed(TENSOR, targets=None), FP8, "isn't as compressed-tensors writes it"),
    "pattern": (compressed(TENSOR, targets=["re:("]), FP8, r"error: missing \)"),
    "ignore": ({**compressed(TENSOR), "ignore": [5]}, FP8, "isn't as compressed-tensors writes it"),
    "inputs": (compressed(TENSOR, input_activations=[1]), FP8, "isn't as compressed-tensors"),
    "structure": (compressed({**BLOCK, "block_structure": ["a", "b"]}), FP8, "'block' with group"),
    "structure of 0": (compressed({**BLOCK, "block_structure": [0, 4]}), FP8, "'block' with group"),
    "sparsity": ({**compressed(TENSOR), "sparsity_config": "x"}, FP8, "asks for sparsity_config"),
    "shape of NaN": (
        compressed(ROWS, PACK),
        {**INT4, "a.weight_shape": torch.tensor([float("nan"), 8.0])},
        "weight_shape is torch.float32, not",
    ),
    "zero point of 65536": (
        compressed(ZERO, PACK),
        {**INT4, "a.weight_zero_point": torch.full((8, 1), 65536)},
        "a holds 65536 … 65536, which 4 bits can't",
    ),
    "zero point of NaN": (
        compressed(ZERO, PACK),
        {**INT4, "a.weight_zero_point": torch.full((8, 1), float("nan"))},
        "weight_zero_point is torch.float32, not",
    ),
    "order of nothing": (gptq(), {**GPTQ, "a.g_idx": torch.tensor(0)}, "g_idx has shape .*a list"),
    "dynamic list": (gptq(dynamic=["a"]), GPTQ, "dynamic must be an object of objects"),
    "dynamic value": (gptq(dynamic={"a": 5}), GPTQ, "dynamic must be an object of objects"),
    "dynamic pattern": (gptq(dynamic={"(": {}}), GPTQ, r"isn't as gptq writes it.*missing \)"),
    "group true": (gptq(group_size=True), GPTQ, "group_size=True for a"),
    "offset null": (BNB, bitsandbytes(nested_offset=None), "a.weight isn't as bitsandbytes writes"),
    "offset list": (BNB, bitsandbytes(nested_offset=[1]), "a.weight isn't as bitsandbytes writes"),
    "shape true": (BNB, bitsandbytes(shape=[True, 512]), "not a matrix"),
    "deep state": (BNB, bitsandbytes(b"[" * 50_000), "isn't the state of a matrix: RecursionError"),
    "1-D int8": (
        BNB,
        {"a.weight": torch.zeros(8, dtype=torch.int8), "a.SCB": torch.ones(8)},
        "it isn't a matrix",
    ),
}


def read(config: dict[str, Any], tensors: Tensors) -> Tensor:
    """The one matrix, in float32."""
    (matrix,) = find_matrices(config, Memory(tensors)).matrices.values()
    found = matrix.read()
    return found.dequantize() if isinstance(found, Codes) else found


@pytest.mark.parametrize("name", WRONG)
def test_values_of_another_kind(name: str) -> None:
    config, tensors, says = WRONG[name]
    with pytest.raises(ModelError, match=f"(?s){says}"):
        read(config, tensors)


def test_what_files_may_leave_out_or_spell_otherwise() -> None:
    plain = read(BNB, bitsandbytes(nested_blocksize=256, nested_offset=0.0))
    assert torch.equal(read(BNB, bitsandbytes()), plain)
    assert torch.equal(read(gptq(bits=4.0), GPTQ), read(gptq(), GPTQ))
    assert read(fp8(modules_to_not_convert="lm_head"), {
        name.replace("a.", "h.l."): tensor for name, tensor in FP8.items()
    }).shape == (8, 8)  # fmt: skip


def test_other_errors_of_penstock_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ConfigError("as it was")  # a ValueError, too

    def run_out(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(METHODS, "fp8", refuse)
    with pytest.raises(ConfigError, match="as it was"):
        find_matrices(fp8(), Memory(FP8))
    monkeypatch.setitem(METHODS, "fp8", run_out)
    with pytest.raises(MemoryError):
        find_matrices(fp8(), Memory(FP8))


def test_a_tensor_that_is_cut_off_while_it_is_read() -> None:
    memory = Memory(GPTQ)
    (matrix,) = find_matrices(gptq(), memory).matrices.values()
    memory.tensors = {name: tensor[:0] for name, tensor in GPTQ.items()}
    with pytest.raises(WeightsError, match=r"a\.weight isn't as gptq writes it: "):
        matrix.read()

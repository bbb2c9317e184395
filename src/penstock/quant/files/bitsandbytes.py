"""Checkpoints of bitsandbytes: NF4 and FP4 in blocks, LLM.int8 in rows.

In 4 bits `weight` is bytes [N · K / 2, 1], the first of two values in the high half, cut into
blocks along the rows of W; `weight.absmax` has a scale for each, itself in 8 bits where it is
nested, and `weight.quant_state.bitsandbytes__nf4` is JSON in bytes. In 8 bits `weight` is int8
[N, K] and `SCB` the largest of each row. Source: bitsandbytes 0.50; Dettmers et al. 2023,
arXiv:2305.14314, and 2022, arXiv:2208.07339.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.layout import (
    Config,
    Found,
    Matrix,
    Tensors,
    check_dtype,
    check_included,
    check_shape,
    finite,
    matrix_shape,
    modules_with,
    need,
    pack_nibbles,
    unpack_nibbles,
)
from penstock.quant.levels import levels
from penstock.quant.scheme import GROUPS, Scheme

_STATE = "weight.quant_state.bitsandbytes__"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    found, names = Found(), set(tensors.names())
    for kind in ("nf4", "fp4"):
        for module in modules_with(tensors, f".{_STATE}{kind}"):
            check_included(module, config, "llm_int8_skip_modules")
            found.matrices[f"{module}.weight"] = _four_bits(tensors, names, module, kind, found)
    for module in modules_with(tensors, ".SCB"):
        check_included(module, config, "llm_int8_skip_modules")
        found.matrices[f"{module}.weight"] = _eight_bits(tensors, names, module)
    known = {part for matrix in found.matrices.values() for part in matrix.parts}
    for name in sorted(names - known):
        dtype = tensors.stored_dtype(name)
        if name.endswith(".weight") and dtype in (torch.uint8, torch.int8):
            raise WeightsError(
                f"{name} is {dtype}, but has neither SCB nor a quant_state beside it. "
                "The checkpoint is incomplete: download or convert it again."
            )
    return found


def _eight_bits(tensors: Tensors, names: set[str], module: str) -> Matrix:
    need(tensors, names, module, "weight")
    weight, scales = f"{module}.weight", f"{module}.SCB"
    check_dtype(tensors, weight, torch.int8)
    n, k = matrix_shape(tensors, weight)
    check_shape(tensors, scales, (n,))
    layout = f"{module}.weight_format"
    if layout in names and tensors.raw(layout).any():  # 0: rows, the only one that is written now
        raise UnsupportedModelError(f"{layout} isn't 0: only weights in plain rows are read.")
    parts = (weight, scales, *((layout,) if layout in names else ()))
    return Matrix((n, k), Scheme("int8"), partial(_read_eight, tensors, weight, scales), parts)


def _read_eight(tensors: Tensors, weight: str, scales: str) -> Codes:
    scale = finite(tensors, scales) / 127
    return Codes(Scheme("int8"), tensors.raw(weight), scale[:, None].contiguous())


def _four_bits(tensors: Tensors, names: set[str], module: str, kind: str, found: Found) -> Matrix:
    need(tensors, names, module, "weight", "weight.absmax")
    state = _state(tensors, f"{module}.{_STATE}{kind}")
    n, k = state["shape"]
    block = state["blocksize"]
    nested = f"{module}.{_NESTED[0]}" in names
    count = -(-n * k // block)
    check_dtype(tensors, f"{module}.weight", torch.uint8)
    packed = -(-n * k // 2)
    check_shape(tensors, f"{module}.weight", (packed, 1), (1, packed), (packed,))
    check_shape(tensors, f"{module}.weight.absmax", (count,))
    if nested:
        need(tensors, names, module, *_NESTED)
        blocks = -(-count // state.get("nested_blocksize", 256))
        check_shape(tensors, f"{module}.{_NESTED[0]}", (blocks,))
        check_shape(tensors, f"{module}.{_NESTED[1]}", (256,))
    scheme = None
    if kind == "nf4" and block in GROUPS and k % block == 0:
        scheme = Scheme("nf4", block)
    else:
        found.note(
            f"{kind} in blocks of {block} of the rows of {k} has no kernel and is widened",
            f"{module}.weight",
        )
    listed = ("weight", "weight.absmax", "weight.quant_map", *_NESTED, f"{_STATE}{kind}")
    parts = tuple(f"{module}.{part}" for part in listed if f"{module}.{part}" in names)
    return Matrix((n, k), scheme, partial(_read_four, tensors, module, kind, state, scheme), parts)


def _state(tensors: Tensors, name: str) -> dict[str, Any]:
    stored = tensors.raw(name)
    try:
        state: dict[str, Any] = json.loads(bytes(stored.tolist()))
        shape, sizes = state["shape"], [state["blocksize"], state.get("nested_blocksize", 256)]
        if len(shape) == 2 and all(type(v) is int and v > 0 for v in (*shape, *sizes)):
            return state
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{name} isn't the state of a matrix: {error!r}.") from error
    raise WeightsError(f"{name} describes shape {shape} in blocks of {sizes[0]}: not a matrix.")


def _read_four(
    tensors: Tensors, module: str, kind: str, state: Mapping[str, Any], scheme: Scheme | None
) -> Tensor | Codes:
    n, k = state["shape"]
    block = state["blocksize"]
    values = unpack_nibbles(tensors.raw(f"{module}.weight").reshape(-1, 1), low_first=False)
    values = values.flatten()[: n * k]
    scale = _absmax(tensors, module, state)
    stored = f"{module}.weight.quant_map"
    table = finite(tensors, stored) if stored in tensors.names() else _levels(kind)
    if table.shape != (16,):
        raise WeightsError(f"{stored} has {table.numel()} levels; 4 bits have 16.")
    if scheme is not None and torch.equal(table, levels("nf4")):
        return Codes(scheme, values.view(n, k), scale.view(n, -1))
    if scheme is not None:
        raise WeightsError(f"{stored} isn't the table of NF4, although its name says so.")
    spread = scale.repeat_interleave(block)[: n * k]
    return (table[values.long()] * spread).view(n, k)


def _levels(kind: str) -> Tensor:
    if kind == "nf4":
        return levels("nf4")
    positive = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
    return torch.cat([positive, -positive])


def _absmax(tensors: Tensors, module: str, state: Mapping[str, Any]) -> Tensor:
    name, nested = f"{module}.weight.absmax", f"{module}.{_NESTED[0]}"
    if nested not in tensors.names():
        return finite(tensors, name)
    codes, table = tensors.raw(name), finite(tensors, f"{module}.{_NESTED[1]}")
    if codes.dtype is not torch.uint8:
        raise WeightsError(f"{name} is {codes.dtype}; nested scales are bytes.")
    outer = finite(tensors, nested).repeat_interleave(state.get("nested_blocksize", 256))
    offset = float(state.get("nested_offset", 0.0))
    if not math.isfinite(offset):
        raise WeightsError(f"{module}: nested_offset is {offset}.")
    return table[codes.long()] * outer[: len(codes)] + offset


def expresses(scheme: Scheme) -> bool:
    """Whether the layout can hold matrices in `scheme`."""
    return scheme.kind == "nf4"


def store(module: str, codes: Codes) -> dict[str, Tensor]:
    """The tensors that hold `codes`: scales in float32, not nested, which would round them."""
    (n, k), block = codes.shape, codes.scheme.group
    if k % block or n * k % 2:
        raise ConfigError(
            f"{module}: bitsandbytes cuts blocks of {block} through rows of {k} values, which "
            f"{codes.scheme.name} doesn't. Choose a group that divides {k}."
        )
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    text = json.dumps(state).encode()
    return {
        f"{module}.weight": pack_nibbles(codes.values, low_first=False).reshape(-1, 1),
        f"{module}.weight.absmax": codes.scale.flatten(),
        f"{module}.weight.quant_map": levels("nf4"),
        f"{module}.{_STATE}nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """For `config.json`: NF4, and linear modules that aren't quantized."""
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": sorted(plain),
        "llm_int8_threshold": 6.0,
    }

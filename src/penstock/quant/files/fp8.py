"""Checkpoints in FP8 as DeepSeek and Qwen publish them: `quant_method: fp8`.

`weight` is E4M3 (or E5M2) and `weight_scale_inv` multiplies it, whatever its name says: one scale
for each block of 128 × 128. Others have `weight_scale` for a whole tensor or for each row.
Activations are rounded to E4M3: with `activation_scheme: dynamic` by a scale for each token (beside
blocks, for each 128 values of a token), with `static` by one, which transformers calls
`activation_scale` and vLLM `input_scale`. Source: DeepSeek-V3, arXiv:2412.19437, 3.3.2, and its
published configs; transformers 5.23, `finegrained_fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.floats import float8_scheme, read_float8
from penstock.quant.files.layout import (
    Config,
    Found,
    Matrix,
    Tensors,
    check_included,
    check_shape,
    is_pair,
    matrix_shape,
    option,
    scale_shape,
    shared,
)
from penstock.quant.scheme import BLOCK, Activations, Scheme

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUTS = ("input_scale", "activation_scale")


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    option(config, "fmt", ("e4m3", "e5m2", None), None)
    block = config.get("weight_block_size")
    dynamic = option(config, "activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    if block is not None and not is_pair(block):
        raise UnsupportedModelError(f"quantization_config has weight_block_size={block!r}.")
    found, names = Found(), set(tensors.names())
    for name in sorted(names):
        module, _, last = name.rpartition(".")
        if last in ("k_scale", "v_scale"):
            found.hidden.add(name)
            found.note("the cache's own scales aren't used (choose it by kv_cache_dtype)", name)
        if tensors.stored_dtype(name) not in _FLOAT8:
            continue
        scales = [f"{module}.{s}" for s in _SCALES if f"{module}.{s}" in names]
        if last != "weight" or len(scales) != 1:
            raise WeightsError(
                f"{name} is {tensors.stored_dtype(name)}, but has {len(scales)} of the tensors "
                f"{', '.join(_SCALES)} beside it; it needs one."
            )
        check_included(module, config, "modules_to_not_convert", "ignored_layers")
        inputs = [f"{module}.{s}" for s in _INPUTS if f"{module}.{s}" in names]
        if not dynamic and len(inputs) != 1:
            raise WeightsError(
                f"quantization_config says that activations are static, but {name} has "
                f"{len(inputs)} of the tensors {', '.join(_INPUTS)} beside it; it needs one."
            )
        parts = (name, scales[0], *inputs)
        matrix = _matrix(tensors, parts, "fp8" if dynamic else "fp8_static", block, found)
        found.matrices[name] = matrix
        finer = matrix.scheme is not None and matrix.scheme.activations == "fp8"
        if finer and config.get("scale_fmt") == "ue8m0":
            found.note("scales of activations aren't rounded up to powers of two (scale_fmt)", name)
    return found


def _matrix(
    tensors: Tensors,
    parts: tuple[str, ...],
    activations: Activations,
    block: Sequence[int] | None,
    found: Found,
) -> Matrix:
    """parts: the weight, its scales, and perhaps the scale of activations."""
    name, scales = parts[:2]
    n, k = matrix_shape(tensors, name)
    if block is not None:
        rows, group = block
        check_shape(tensors, scales, scale_shape(n, k, group, rows))
    else:
        check_shape(tensors, scales, (), (1,), (1, 1), (n,), (n, 1))
        rows, group = (0 if tensors.shape(scales) in ((), (1,), (1, 1)) else 1), 0
    dtype = tensors.stored_dtype(name)
    e4m3 = dtype is torch.float8_e4m3fn
    scheme = float8_scheme(dtype, group, rows, activations if e4m3 else "float")
    if scheme is None:
        found.note(f"scales of {rows} × {group} values have no kernel and are widened", name)
    if scheme is None or not e4m3:
        found.note("activations stay in bfloat16, not in the checkpoint's float8", name)
    read = partial(read_float8, tensors, name, scales, (group, rows), scheme, parts[-1])
    return Matrix((n, k), scheme, read, parts)


def expresses(scheme: Scheme) -> bool:
    """Whether the layout can hold matrices in `scheme`: its readers round activations to E4M3."""
    return scheme.kind == "fp8_e5m2" or (
        scheme.kind == "fp8_e4m3" and scheme.activations != "float"
    )


def store(module: str, codes: Codes) -> dict[str, Tensor]:
    """The tensors that hold `codes`; scales in float32, as in the published ones."""
    scale = shared(module, codes.scale, codes.scheme.rows)
    scale = scale.reshape(-1, codes.scale.shape[1])
    out = {f"{module}.weight": codes.values.contiguous(), f"{module}.weight_scale_inv": scale}
    if codes.input_scale is not None:
        out[f"{module}.activation_scale"] = torch.tensor(codes.input_scale)
    return out


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """For `config.json`: the one scheme, and linear modules that aren't quantized."""
    (scheme,) = set(schemes.values())
    return {
        "quant_method": "fp8",
        "fmt": scheme.kind.removeprefix("fp8_"),
        "activation_scheme": "static" if scheme.static else "dynamic",
        "weight_block_size": [BLOCK, BLOCK] if scheme.rows == BLOCK else None,
        "modules_to_not_convert": sorted(plain),
    }

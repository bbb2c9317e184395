"""Checkpoints of GPTQ: AutoGPTQ's layout and GPTQModel's second version of it.

`qweight` int32 [K · bits / 32, N], `qzeros` int32 [G, N · bits / 32], `scales` [G, N], `g_idx`
[K], the group of each column. Version 1 stores zero points less one. Source: AutoGPTQ 0.7
`qlinear_cuda`, GPTQModel `checkpoint_format`; Frantar et al. 2022, arXiv:2210.17323.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes, groups
from penstock.quant.files.layout import (
    Config,
    Found,
    Matrix,
    Tensors,
    check_included,
    integer_scheme,
    matrix_shape,
    modules_with,
    need,
    option,
    pack_bits,
    smallest_exact,
    unpack_bits,
)
from penstock.quant.files.words import PARTS, Coding, check_parts, group_size
from penstock.quant.scheme import Scheme

_BITS = (2, 3, 4, 8)


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"quantization_config has GPTQ's checkpoint_format {version!r}; 'gptq' and 'gptq_v2' "
            "are read."
        )
    found, names = Found(), set(tensors.names())
    for module in modules_with(tensors, ".qweight"):
        check_included(module, config, "modules_to_not_convert")
        need(tensors, names, module, "qzeros", "scales")
        own = {**config, **_override(module, config)}
        found.matrices[f"{module}.weight"] = _matrix(
            tensors, names, module, own, version == "gptq", found
        )
    return found


def _override(module: str, config: Config) -> Mapping[str, Any]:
    """What GPTQModel's `dynamic` says of `module` alone; "-:" leaves it unquantized."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(v, Mapping) for v in dynamic.values()
    ):
        raise WeightsError(
            f"quantization_config's dynamic must be an object of objects: {dynamic!r}."
        )
    for pattern, values in dynamic.items():
        if not re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
            continue
        if pattern.startswith("-:"):
            raise WeightsError(
                f"quantization_config's dynamic leaves {pattern!r} unquantized, but {module} is "
                "quantized in the weights. They don't belong together."
            )
        return dict(values)
    return {}


def _matrix(
    tensors: Tensors,
    names: set[str],
    module: str,
    config: Config,
    less_one: bool,
    found: Found,
) -> Matrix:
    bits = option(config, "bits", _BITS, None)
    symmetric = option(config, "sym", (True, False), True)
    group = group_size(config, module, -1)
    has_order = f"{module}.g_idx" in names
    listed = (*PARTS, *(("g_idx",) if has_order else ()))
    parts = tuple(f"{module}.{part}" for part in listed)
    words, n = matrix_shape(tensors, parts[0])
    if has_order and len(tensors.shape(parts[3])) != 1:
        raise WeightsError(
            f"{parts[3]} has shape {list(tensors.shape(parts[3]))}: it isn't a list."
        )
    k = tensors.shape(parts[3])[0] if has_order else words * 32 // bits
    count = groups(k, group)
    check_parts(tensors, parts, (-(-k * bits // 32), n), (count, -(-n * bits // 32)), (count, n))
    of = _column_group(tensors, parts[3], k, group) if has_order else None
    scheme = integer_scheme(bits, group, symmetric) if of is None else None
    if of is not None:
        found.note("columns aren't in the order of their groups (desc_act)", f"{module}.weight")
    elif scheme is None:
        found.note(
            f"{bits} bits in groups of {group} have no kernel and are widened", f"{module}.weight"
        )
    says = "sym is true" + (" and checkpoint_format 'gptq'" if less_one else "")
    coding = Coding(bits, group, symmetric, says)
    read = partial(_read, tensors, parts, coding, (n, k), less_one, of, scheme)
    return Matrix((n, k), scheme, read, parts)


def _column_group(tensors: Tensors, name: str, k: int, group: int) -> Tensor | None:
    """The group of each column, where it isn't its number divided by the group's size."""
    of, count = tensors.raw(name).long(), groups(k, group)
    if of.ndim != 1 or int(of.min()) < 0 or int(of.max()) >= count:
        raise WeightsError(
            f"{name} names groups {int(of.min())} … {int(of.max())}, but {k} columns in groups "
            f"of {group or k} have {count}."
        )
    return None if torch.equal(of, torch.arange(k) // (group or k)) else of


def _read(
    tensors: Tensors,
    parts: tuple[str, ...],
    coding: Coding,
    shape: tuple[int, int],
    less_one: bool,
    of: Tensor | None,
    scheme: Scheme | None,
) -> Tensor | Codes:
    (n, k), bits = shape, coding.bits
    unsigned = unpack_bits(tensors.raw(parts[0]).t(), bits, k)
    zero = unpack_bits(tensors.raw(parts[1]), bits, n).t().contiguous()
    if less_one:  # zero points have `bits` bits: 0 is stored as all ones
        zero = (zero + 1) & (2**bits - 1)
    return coding.read(tensors, parts, unsigned, zero, scheme, of)


def expresses(scheme: Scheme) -> bool:
    """Whether the layout can hold matrices in `scheme`."""
    return scheme.is_integer and scheme.activations == "float" and scheme.rows == 1


def store(module: str, codes: Codes) -> dict[str, Tensor]:
    """The tensors that hold `codes`; version 1 where they are symmetric, else version 2."""
    (n, k), scheme = codes.shape, codes.scheme
    per_word = 32 // scheme.bits
    if n % per_word or k % per_word:
        raise ConfigError(
            f"{module}: GPTQ packs {per_word} rows and {per_word} columns to a word, and "
            f"[{n}, {k}] isn't made of such. Use layout='compressed-tensors'."
        )
    if "embed" in module:
        raise ConfigError(
            f"GPTQ keeps {module} unquantized: leave it so, or use layout='compressed-tensors'."
        )
    flip = 128 if scheme.bits == 8 else 0
    unsigned = codes.values.view(torch.uint8) ^ flip
    if codes.zero is None:
        stored = torch.full_like(codes.scale, 2 ** (scheme.bits - 1) - 1, dtype=torch.uint8)
    else:
        stored = codes.zero.view(torch.uint8) ^ flip
    return {
        f"{module}.qweight": pack_bits(unsigned, scheme.bits).t().contiguous(),
        f"{module}.qzeros": pack_bits(stored.t(), scheme.bits),
        f"{module}.scales": smallest_exact(codes.scale.t().contiguous()),
        f"{module}.g_idx": (torch.arange(k) // (scheme.group or k)).to(torch.int32),
    }


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """For `config.json`: the one scheme. Modules without it are those without its tensors."""
    (scheme,) = set(schemes.values())
    version = "gptq" if scheme.symmetric else "gptq_v2"
    return {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "format": version,
        "bits": scheme.bits,
        "group_size": scheme.group or -1,
        "sym": scheme.symmetric,
        "desc_act": False,
        "lm_head": any(module.endswith("lm_head") for module in schemes),
        "dynamic": {f"-:^{re.escape(m)}$": {} for m in sorted(plain) if not m.endswith("lm_head")},
    }

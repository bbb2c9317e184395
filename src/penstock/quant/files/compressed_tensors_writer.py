"""Matrices as compressed-tensors stores them; `compressed_tensors` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.floats import exponents, reciprocal
from penstock.quant.files.layout import pack_bits, pack_nibbles, shared, smallest_exact
from penstock.quant.scheme import BLOCK, Scheme


def store(module: str, codes: Codes) -> dict[str, Tensor]:
    """The tensors that hold `codes`."""
    scheme, k = codes.scheme, codes.shape[1]
    out: dict[str, Tensor] = {}
    match scheme.kind:
        case "int4" | "int8":
            out = _store_integers(module, codes)
        case "fp8_e4m3":
            out["weight"] = codes.values
            out["weight_scale"] = _stored_scale(module, codes)
        case "mxfp4" | "nvfp4":
            if k % scheme.group:
                raise ConfigError(
                    f"{module}: {scheme.name} is stored in whole groups of {scheme.group}, and "
                    f"K = {k} isn't made of such. Leave it unquantized, or choose another scheme."
                )
            out["weight_packed"] = pack_nibbles(codes.values)
            if scheme.kind == "mxfp4":
                out["weight_scale"] = exponents(module, codes)
            else:
                out |= _store_nvfp4_scales(module, codes)
    if codes.input_scale is not None:
        out["input_scale"] = torch.tensor([codes.input_scale])
    return {f"{module}.{part}": tensor.contiguous() for part, tensor in out.items()}


def _stored_scale(module: str, codes: Codes) -> Tensor:
    scale = shared(module, codes.scale, codes.scheme.rows)
    return smallest_exact(scale)


def _store_integers(module: str, codes: Codes) -> dict[str, Tensor]:
    scheme, (n, k) = codes.scheme, codes.shape
    out = {"weight_scale": _stored_scale(module, codes)}
    signed = codes.values if scheme.bits == 8 else (codes.values.to(torch.int8) - 8)
    zero = None
    if codes.zero is not None:
        zero = codes.zero.to(torch.int8) - (0 if scheme.bits == 8 else 8)
        zero = shared(module, zero, scheme.rows)
    if _format(scheme) == "int-quantized":
        out["weight"] = signed
        return out if zero is None else out | {"weight_zero_point": zero}
    unsigned = codes.values.view(torch.uint8) ^ 128 if scheme.bits == 8 else codes.values
    out["weight_packed"] = pack_bits(unsigned, scheme.bits)
    out["weight_shape"] = torch.tensor([n, k])
    if zero is not None and scheme.rows == 1:
        raised = (zero.to(torch.int16) + 2 ** (scheme.bits - 1)).to(torch.uint8)
        zero = pack_bits(raised.t(), scheme.bits).t()
    return out if zero is None else out | {"weight_zero_point": zero}


def _store_nvfp4_scales(module: str, codes: Codes) -> dict[str, Tensor]:
    assert codes.outer is not None
    outer = float(codes.outer[0])
    if not bool((codes.outer == outer).all()) or outer <= 0:
        raise WeightsError(f"{module}: a matrix in nvfp4 has one positive second scale to store.")
    scale = codes.scale.to(torch.float8_e4m3fn)
    if not torch.equal(scale.float(), codes.scale):
        raise WeightsError(f"{module}: scales of nvfp4 that aren't E4M3 can't be stored.")
    return {"weight_scale": scale, "weight_global_scale": reciprocal(codes.outer[:1])}


def expresses(scheme: Scheme) -> bool:
    """Whether the layout can hold matrices in `scheme`."""
    apart = scheme.rotated or scheme.activations == "int8_blocks"
    return scheme.kind not in ("fp8_e5m2", "nf4") and not scheme.is_k and not apart


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """For `config.json`: the scheme of each quantized module, and linear modules that aren't.

    The commonest scheme is that of all linear layers; others name their modules.
    """
    kinds = list(schemes.values())
    common = max(dict.fromkeys(kinds), key=kinds.count)
    listed = {}
    for i, scheme in enumerate(sorted(set(kinds), key=lambda s: (s != common, s.name))):
        modules = sorted(m for m, s in schemes.items() if s == scheme)
        targets = modules
        if scheme == common:  # heads and embeddings are classes of their own elsewhere
            targets = ["Linear", *(m for m in modules if "embed" in m or m.endswith("lm_head"))]
        listed[f"group_{i}"] = {"targets": targets, **_describe(scheme)}
    formats = {group["format"] for group in listed.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": listed,
        "ignore": sorted(plain),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(scheme: Scheme) -> str:
    if scheme.kind in ("nvfp4", "mxfp4"):
        return f"{scheme.kind}-pack-quantized"
    if scheme.kind == "fp8_e4m3":
        return "naive-quantized" if scheme.activations == "float" else "float-quantized"
    return "pack-quantized" if scheme.activations == "float" else "int-quantized"


def _describe(scheme: Scheme) -> dict[str, Any]:
    strategy = "tensor" if scheme.rows == 0 else "group" if scheme.group else "channel"
    if scheme.kind == "nvfp4":
        strategy = "tensor_group"
    if scheme.rows == BLOCK:
        strategy = "block"
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.is_integer else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group if strategy in ("group", "tensor_group") else None,
        "dynamic": False,
    }
    if strategy == "block":
        weights["block_structure"] = [BLOCK, scheme.group]
    return {
        "weights": weights,
        "input_activations": None if scheme.activations == "float" else _describe_inputs(scheme),
        "output_activations": None,
        "format": _format(scheme),
    }


def _describe_inputs(scheme: Scheme) -> dict[str, Any]:
    grouped = scheme.activations == "fp8" and scheme.group > 0
    return {
        "num_bits": 8,
        "type": "int" if scheme.is_integer else "float",
        "symmetric": True,
        "dynamic": not scheme.static,
        "strategy": "tensor" if scheme.static else "group" if grouped else "token",
        "group_size": scheme.group if grouped else None,
    }

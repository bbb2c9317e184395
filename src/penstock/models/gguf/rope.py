"""Rotary embeddings from GGUF: metadata, or tensors with a divisor for each frequency."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UnsupportedModelError
from penstock.models.gguf.container import Container, TensorInfo
from penstock.models.gguf.cursor import shortest
from penstock.models.gguf.metadata import Metadata

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
"""Tensors that are part of the configuration rather than weights."""

_LOW, _HIGH = 1.0, 4.0
"""Llama 3.1's and 3.2's; a file has only what follows from them."""
_ROUNDING = 1e-5
"""Of divisors that converters computed in float32."""
_STILL = 1e29
"""Divisors from here on are of pairs that don't turn."""


def rope_config(m: Metadata, container: Container, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` and `rope_scaling` as config.json has them."""
    theta = m.number(m.own("rope.freq_base"), 10_000.0)
    if not 0 < theta < math.inf:
        raise m.fail(m.own("rope.freq_base"), theta, "above 0")
    config: dict[str, Any] = {"rope_theta": theta}
    turning = m.integer(m.own("rope.dimension_count"), head_dim)
    if turning != head_dim:
        config["partial_rotary_factor"] = share_of(turning, head_dim)
    scaling = _scaling(m)
    tensors = container.tensors
    if FREQUENCIES in tensors:
        if scaling:
            raise UnsupportedModelError(
                f"{container.path} scales its rope twice: by {FREQUENCIES} and by "
                f"{m.own('rope.scaling.type')}={scaling['rope_type']!r}."
            )
        scaling = _by_frequency(tensors[FREQUENCIES], theta, turning, _context(m))
    elif LONG in tensors and SHORT in tensors:
        return config | _longrope(m, tensors[LONG], tensors[SHORT], turning)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def proportional_config(
    m: Metadata, container: Container, local_dim: int, dim: int
) -> dict[str, Any]:
    """`rope_parameters` of layers that slide, with heads of `local_dim`, and of those that see
    everything, with heads of `dim`: there `FREQUENCIES` says how many pairs turn.
    """
    sizes = (("rope.dimension_count_swa", local_dim), ("rope.dimension_count", dim))
    for key, whole in sizes:
        if (turning := m.integer(m.own(key), whole)) != whole:
            raise m.fail(m.own(key), turning, f"the length of a head, {whole}")
    if scaling := _scaling(m):
        raise m.fail(m.own("rope.scaling.type"), scaling["rope_type"], "none for this family")
    if FREQUENCIES not in container.tensors:
        raise UnsupportedModelError(
            f"{container.path} has no {FREQUENCIES}, which says how many pairs of a head turn."
        )
    divisors = _values(container.tensors[FREQUENCIES], dim // 2)
    moves = int((divisors == 1).sum())
    if moves == 0 or (divisors[:moves] != 1).any() or (divisors[moves:] < _STILL).any():
        raise UnsupportedModelError(
            f"{FREQUENCIES} in {container.path} must be 1 for the first pairs, and 1e30 for others."
        )
    local, theta = (m.number(m.own(f"rope.freq_base{x}"), d) for x, d in (("_swa", 1e4), ("", 1e6)))
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share_of(2 * moves, dim),
            "rope_theta": theta,
        },
    }


def share_of(part: int, whole: int) -> float:
    """part / whole, rounded so that the whole number below `whole` times it is `part`."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, math.inf)


def _context(m: Metadata) -> int:
    return m.integer(m.own("context_length"))


def _scaling(m: Metadata) -> dict[str, Any]:
    """`rope_scaling`; {} where nothing is scaled."""
    legacy = m.number(m.own("rope.scale_linear"), 1.0)
    factor = m.number(m.own("rope.scaling.factor"), legacy)
    kind = m.text(m.own("rope.scaling.type"), "linear")  # as llama.cpp takes it where there is none
    m.get(m.own("rope.scaling.finetuned"))  # how the model came about
    original = m.integer(m.own("rope.scaling.original_context_length"), _context(m))
    attention = m.number(m.own("rope.scaling.attn_factor"), 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)) or kind == "longrope":
        return {}  # longrope's are tensors
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise m.fail(m.own("rope.scaling.type"), kind, "none, linear, yarn or longrope")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if m.get(m.own(f"rope.scaling.{theirs}")) is not None:
            scaling[ours] = m.number(m.own(f"rope.scaling.{theirs}"))
    attention *= m.number(m.own("rope.scaling.yarn_attn_factor"), 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    if m.number(m.own("rope.scaling.yarn_ext_factor"), 1.0) != 1.0:
        raise m.fail(m.own("rope.scaling.yarn_ext_factor"), "another", "1")
    return scaling


def _values(tensor: TensorInfo, count: int) -> NDArray[np.float32]:
    if tensor.block.name != "F32" or tensor.shape != (count,):
        raise UnsupportedModelError(
            f"{tensor.name} {list(tensor.shape)} in {tensor.block.name} must be F32 [{count}]: "
            "a divisor for each pair of dimensions that turns."
        )
    values = tensor.data.view("<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise UnsupportedModelError(f"{tensor.name} has values that aren't above 0.")
    return values


def _longrope(m: Metadata, long: TensorInfo, short: TensorInfo, turning: int) -> dict[str, Any]:
    """Phi 3's: one divisor list up to the original context, one beyond."""
    context = _context(m)
    original = m.integer(m.own("rope.scaling.original_context_length"), context)
    if original < 2:
        raise m.fail(m.own("rope.scaling.original_context_length"), original, "above 1")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [shortest(v) for v in _values(short, turning // 2)],
        "long_factor": [shortest(v) for v in _values(long, turning // 2)],
    }
    ratio = context / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    given = m.number(m.own("rope.scaling.attn_factor"), usual)
    if np.float32(given) != np.float32(usual):
        scaling["attention_factor"] = given
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _by_frequency(tensor: TensorInfo, theta: float, turning: int, context: int) -> dict[str, Any]:
    """Llama 3's parameters where the divisors follow from some, else the divisors themselves."""
    divisors = _values(tensor, turning // 2)
    factor = shortest(divisors.max())
    if factor == 1.0 and divisors.min() == 1.0:
        return {}
    for power in range(5, 24):
        expected = _llama3(theta, turning, factor, 1 << power)
        if np.allclose(divisors, expected, rtol=_ROUNDING, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": 1 << power,
            }
    each = [shortest(v) for v in divisors]
    return {
        "rope_type": "longrope",  # both lists alike: divisors, whatever the length
        "short_factor": each,
        "long_factor": each,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _llama3(theta: float, turning: int, factor: float, original: int) -> NDArray[np.float64]:
    """The divisors that follow from Llama 3.1's parameters; `nn.rope` has the other direction."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, turning, 2, dtype=np.float64) / turning)
    smooth = np.clip((original / wavelengths - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))

"""Round to nearest: each value by itself, the scale from its group alone (`ops.quantize`).

Source: Jacob et al. 2017, arXiv:1712.05877; Dettmers & Zettlemoyer 2022, arXiv:2212.09720.
"""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.errors import WeightsError
from penstock.quant.format import Packed


def round_int8(weight: Tensor, gated: bool = False) -> Packed:
    """[N, K] → int8 panels, one scale for a row."""
    panels, scale = ops.quantize_int8(weight, gated)
    _check(weight, scale)
    return {"weight": panels, "scale": scale}


def round_int4(weight: Tensor, group: int, symmetric: bool, gated: bool = False) -> Packed:
    """[N, K] → int4 panels with scales, and zero points where not symmetric, of groups of K."""
    panels, scale, zero = ops.quantize_int4(weight, group, symmetric, gated)
    _check(weight, scale)
    packed = {"weight": panels, "scale": scale}
    return packed if symmetric else {**packed, "zero": zero}


def _check(weight: Tensor, scale: Tensor) -> None:
    """The operators mark what they can't round by its scale."""
    if bool(scale.isfinite().all()):
        return
    bad = ~weight.isfinite()
    if bool(bad.any()):
        raise WeightsError(
            f"{int(bad.sum())} of {weight.numel()} values of a weight {list(weight.shape)} are NaN "
            "or infinite and can't be quantized. The checkpoint is damaged."
        )
    raise WeightsError(
        f"A weight of {float(weight.abs().max()):.3g} needs a scale beyond float16's 65,504: these "
        "aren't weights of a trained model. Load them without quantization."
    )

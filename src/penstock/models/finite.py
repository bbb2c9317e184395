"""Values that no model can be run with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.models.spec import ModelSpec
from penstock.models.weights import sources_of

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, values: Tensor) -> None:
    """Raises WeightsError where a tensor called `name`, as stored or packed, has NaN or infinity.

    Codes are left out: formats check what theirs stand for as they pack.
    """
    bad = _broken(values)
    if bad:
        raise WeightsError(_told(bad, values, name))


def why_not_finite(model: nn.Module, spec: ModelSpec) -> str:
    """Where a model's logits that aren't finite come from, as a sentence or two.

    It reads all of the weights that are here, which takes as long as a step.
    """
    for name, tensor in model.named_parameters():
        bad = _broken(tensor)
        if bad:
            return _told(bad, tensor, ", ".join(sources_of(name, spec)) or name)
    return (
        "Its weights are all finite, so numbers grew too large on the way: a damaged checkpoint, a "
        "config.json that isn't its own, or a format with too few bits. Compare dtype float32."
    )


def _told(bad: int, values: Tensor, name: str) -> str:
    return (
        f"{bad} of {values.numel()} values of {name} are NaN or infinite. The checkpoint is "
        "damaged: copy or convert it again."
    )


def _broken(values: Tensor) -> int:
    """How many floats are NaN or infinite."""
    if values.dtype not in _FLOATS or not values.numel() or values.is_meta:
        return 0
    if all(math.isfinite(end) for end in values.aminmax()):  # NaN is both ends; no copy is made
        return 0
    return int((~values.isfinite()).sum())

"""Values that no model can be run with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.errors import WeightsError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, values: Tensor) -> None:
    """Raises WeightsError where a tensor called `name`, as stored or packed, has NaN or infinity.

    Codes are left out: formats check what theirs stand for as they pack.
    """
    if values.dtype not in _FLOATS or not values.numel():
        return
    if all(math.isfinite(end) for end in values.aminmax()):  # NaN is both ends; no copy is made
        return
    bad = int((~values.isfinite()).sum())
    raise WeightsError(
        f"{bad} of {values.numel()} values of {name} are NaN or infinite. The checkpoint is "
        "damaged: copy or convert it again."
    )

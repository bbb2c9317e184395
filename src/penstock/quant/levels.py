"""The sixteen values that codes of four bits stand for, where they aren't integers."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.levels import E2M1, NF4

__all__ = ["E2M1", "NF4", "levels"]


def levels(kind: str) -> Tensor:
    """The [16] float32 values of `nf4`, `mxfp4` or `nvfp4`."""
    return torch.tensor(NF4 if kind == "nf4" else E2M1)

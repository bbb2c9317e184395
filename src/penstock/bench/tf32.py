"""TF32 on any device: what a product multiplies is rounded to it first, and added up in float32.

TF32 has float32's exponent and 10 bits of mantissa; NVIDIA's matrix units take it since Ampere
(NVIDIA A100 whitepaper, 2020). Here each operator of a float32 model is given rounded operands:
rows and weights, queries, keys and values. What softmax weighs values by is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ops
from penstock.ops.registry import NAMESPACE

_OPERANDS = {
    "linear": ("x", "weight"),
    "linear_add_": ("x", "weight"),
    "linear_unordered": ("x", "weight"),
    "linear_unordered_add_": ("x", "weight"),
    "grouped_linear": ("x", "weight"),
    "head_linear": ("x", "weight"),
    "paged_attention": ("q", "key_cache", "value_cache"),
    "mla_query": ("q", "key_up"),
    "mla_attention": ("q", "cache"),
}
"""What the operators that multiply matrices are given."""


def rounded(x: Tensor) -> Tensor:
    """x float32 to 10 bits of mantissa, to nearest, halves away from zero."""
    bits = x.contiguous().view(torch.int32)
    near = ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    return torch.where(x.isfinite(), near, x)


class Tf32(TorchDispatchMode):
    """While entered, every product of Penstock's operators is one of TF32."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its compiler, for a second and more, at the first call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, op = func.name().partition("::")
        operands = _OPERANDS.get(op, ()) if space == NAMESPACE else ()
        if not operands:
            return func(*args, **(kwargs or {}))
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        if given.get("norm") is not None:  # of rows before they are multiplied
            given["x"] = ops.rms_norm(given["x"], given["norm"], given["eps"])
            given["norm"] = None
        return func(**given | {name: rounded(given[name]) for name in operands})

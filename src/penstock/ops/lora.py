"""What low-rank adapters add to a product, each row with its own adapter.

Sources: LoRA: Hu et al. 2021, arXiv:2106.09685; batches of many adapters: Chen et al. 2023,
arXiv:2310.18547 (Punica: gather, shrink, expand), Sheng et al. 2023, arXiv:2311.03285 (S-LoRA:
ranks that differ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.linear import linear
from penstock.ops.panels import COLUMNS
from penstock.ops.registry import define_op


def check_adapters(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, scaling: Tensor
) -> None:
    """Refuse what doesn't fit together, by shapes and dtypes alone."""
    count = down.shape[0]
    if (
        up.shape[0] != count
        or scaling.shape != (count,)
        or scaling.dtype is not torch.float32
        or down.dim() != up.dim()
    ):
        raise RuntimeError(
            f"lora_add_: down, up and float32 scaling of {count} adapters don't fit: "
            f"{list(down.shape)}, {list(up.shape)}, {scaling.dtype} {list(scaling.shape)}"
        )
    if down.dtype is not x.dtype or up.dtype is not x.dtype:
        raise RuntimeError(
            f"lora_add_: adapters must be of x's {x.dtype}, not {down.dtype} and {up.dtype}"
        )
    if adapters.dtype is not torch.int32 or not adapters.shape == x.shape[:1] == y.shape[:1]:
        raise RuntimeError(
            f"lora_add_: adapters must be int32 [{x.shape[0]}], one for each row of x and y, not "
            f"{adapters.dtype} {list(adapters.shape)}; y has {y.shape[0]} rows"
        )
    if down.dim() == 3 and (
        down.shape[1] != up.shape[2] or down.shape[2] != x.shape[1] or up.shape[1] != y.shape[1]
    ):
        raise RuntimeError(
            f"lora_add_: down [A, R, K] and up [A, N, R] are {list(down.shape)} and "
            f"{list(up.shape)}; x has K = {x.shape[1]}, y has N = {y.shape[1]}"
        )


def _fake(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, scaling: Tensor
) -> None:
    return None


def _product(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """x · Wᵀ in float32, natively where W is in panels."""
    if weight.dim() == 2:
        return x.float() @ weight.float().t()
    return linear(x, weight, None, None, None, out_features, out_dtype=torch.float32)


@define_op(
    "lora_add_(Tensor(a!) y, Tensor x, Tensor down, Tensor up, Tensor adapters, "
    "Tensor scaling) -> ()",
    fake=_fake,
)
def lora_add_(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, scaling: Tensor
) -> None:
    """y[t] += scaling[a] · (x[t] · down[a]ᵀ) · up[a]ᵀ in place, a = adapters[t].

    y [T, N] of x.dtype or float32, x [T, K], rows of both may be strided; adapters [T] int32 below
    A, negative: none, and the row isn't touched. down [A, R, K] and up [A, N, R] of x.dtype, each
    in rows or each matrix in panels; smaller ranks are padded with zeros. scaling [A] float32,
    alpha / rank.
    x · downᵀ is summed in float32 and rounded to x.dtype once, as the two modules that an adapter
    is trained as round it, and so that the second product has factors of 16 bits; that is summed
    in float32, scaled, added to y, and rounded once.
    A row's bits depend on no other row and on no other adapter.
    Adapters run one by one, each with all of its rows; that reads `adapters`, which a GPU would be
    waited for. Native: matrices in panels.
    Cost: 2·T·R·(K + N) operations; the bytes of the adapters that have rows; memory-bound for few
    rows an adapter.
    Source: Hu et al. 2021, arXiv:2106.09685; above.
    """
    check_adapters(y, x, down, up, adapters, scaling)
    rank = down.shape[1] * (COLUMNS if down.dim() > 3 else 1)
    for a in adapters.unique().tolist():
        if a < 0:
            continue
        if a >= down.shape[0]:
            raise RuntimeError(f"lora_add_: there is no adapter {a} of {down.shape[0]}")
        at = (adapters == a).nonzero().squeeze(1)
        hidden = _product(x[at], down[a], rank).to(x.dtype)
        change = _product(hidden, up[a], y.shape[1]) * scaling[a]
        y[at] = (y[at].float() + change).to(y.dtype)

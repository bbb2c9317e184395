"""Which experts a token goes to, and the order in which experts take their tokens.

Sizes of all results follow from those of the arguments, so nothing waits for a GPU to say how many
tokens an expert got.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def check_route(logits: Tensor, k: int) -> None:
    """Refuse a k that can't be chosen."""
    if not 1 <= k <= logits.shape[1]:
        raise RuntimeError(
            f"route: {k} experts a token can't be chosen of {logits.shape[1]}; "
            "k must be from 1 to their number"
        )


def _fake(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@define_op(
    "route(Tensor logits, int k, bool normalize) -> (Tensor weights, Tensor experts)", fake=_fake
)
def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k experts with the largest logits of each token, and their weights.

    logits [T, E] any float, rows may be strided. Returns weights [T, k] float32 and experts [T, k]
    int32, by logit, the largest first, then by number; NaN counts as the largest, -0 equals 0.
    normalize: weights are the softmax of the k logits alone, and sum to 1: what the softmax over
    all experts gives the chosen, divided by its sum over them (Mixtral; Qwen's norm_topk_prob),
    equals it but for rounding. Otherwise they are the softmax over all E.
    Raises RuntimeError for a k beyond 1 to E.
    Cost: T·E·itemsize bytes read; in cache.
    Source: top k before softmax: Shazeer et al. 2017, arXiv:1701.06538, Jiang et al. 2024,
    arXiv:2401.04088; after it: Fedus et al. 2021, arXiv:2101.03961.
    """
    check_route(logits, k)
    ordered, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    values = ordered[:, :k] if normalize else ordered
    weights = values.softmax(-1)[:, :k]
    return weights.contiguous(), experts[:, :k].to(torch.int32)


def check_experts(experts: Tensor, num_experts: int) -> None:
    """Refuse what can't be sorted."""
    if experts.dtype is not torch.int32 or experts.dim() != 2 or num_experts < 1:
        raise RuntimeError(
            f"sort_tokens: experts must be int32 [T, k] of at least one expert, not "
            f"{experts.dtype} {list(experts.shape)} of {num_experts}"
        )


def _fake_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    count = experts.shape[0] * experts.shape[1]
    return (
        experts.new_empty((count,)),
        experts.new_empty((num_experts + 1,)),
        experts.new_empty(experts.shape),
    )


@define_op(
    "sort_tokens(Tensor experts, SymInt num_experts) "
    "-> (Tensor rows, Tensor starts, Tensor places)",
    fake=_fake_sort,
)
def sort_tokens(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order in which experts take their tokens, what `grouped_linear` and `combine` want.

    experts [T, k] int32. Returns, all int32, rows [T·k]: the token of each product, by expert,
    then by token, then by j; starts [E + 1]: expert e has products starts[e] to starts[e + 1];
    places [T, k]: the product of each choice. A choice below 0 or from num_experts on (of another
    machine's expert, say) is no product: its token stands in rows from starts[E] on, its place
    is -1.
    Cost: a few bytes for each choice and expert; in cache.
    """
    check_experts(experts, num_experts)
    flat = experts.flatten()
    inside = (flat >= 0) & (flat < num_experts)
    keys, order = torch.where(inside, flat, num_experts).sort(stable=True)
    rows = (order // max(experts.shape[1], 1)).to(torch.int32)
    numbers = torch.arange(num_experts + 1, dtype=torch.int32, device=flat.device)
    starts = torch.searchsorted(keys, numbers, out_int32=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    return rows, starts, torch.where(inside, places, -1).view(experts.shape)

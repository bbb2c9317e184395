"""Which experts a token goes to, and the order in which experts take their tokens.

Sizes of all results follow from those of the arguments, so nothing waits for a GPU to say how many
tokens an expert got.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def check_route(logits: Tensor, k: int, groups: int = 1, top_groups: int = 1) -> None:
    """Refuse what can't be chosen."""
    count = logits.shape[1]
    if not 1 <= k <= count:
        raise RuntimeError(
            f"route: {k} experts a token can't be chosen of {count}; "
            "k must be from 1 to their number"
        )
    if groups < 1 or count % groups or not 1 <= top_groups <= groups:
        raise RuntimeError(
            f"route: {count} experts can't be chosen from {top_groups} of {groups} groups"
        )
    if k > count // groups * top_groups:
        raise RuntimeError(
            f"route: {k} experts a token can't be chosen from {top_groups} groups of "
            f"{count // groups}"
        )


def _fake(
    logits: Tensor,
    k: int,
    normalize: bool,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    eps: float = 1e-20,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _of_best_groups(wish: Tensor, groups: int, top_groups: int, pair: bool) -> Tensor:
    """-inf for the experts of all but the best groups: by the best of each, or its two best."""
    each = wish.unflatten(1, (groups, -1))
    best = each.topk(min(2 if pair else 1, each.shape[-1]), dim=-1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    hidden: Tensor = each.masked_fill(~mask.unsqueeze(-1), float("-inf"))
    return hidden.flatten(1)


@define_op(
    "route(Tensor logits, int k, bool normalize, Tensor? correction=None, bool sigmoid=False, "
    "int groups=1, int top_groups=1, float scale=1.0, float eps=1e-20, Tensor? each=None) "
    "-> (Tensor weights, Tensor experts)",
    fake=_fake,
)
def route(
    logits: Tensor,
    k: int,
    normalize: bool,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    eps: float = 1e-20,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k experts that each token wants most, and their weights.

    logits [T, E] any float, rows may be strided. Returns weights [T, k] float32 and experts [T, k]
    int32, by logit, the largest first, then by number; NaN counts as the largest, -0 equals 0.
    An expert's share of a token is its logit's sigmoid, or else the softmax over all; correction
    [E] float32 is added to shares, for the choice alone. groups: of E / groups experts each, of
    which only those of the top_groups best groups can be chosen: those with the largest share, or
    with a correction the largest sum of two.
    normalize: weights are the shares of the k divided by their sum. Of a softmax that is the
    softmax of the k logits alone (Mixtral; Qwen's norm_topk_prob); eps is added to a sum of
    sigmoids. scale: multiplies them last, and each [E] float32 those of every expert.
    Raises RuntimeError for a k beyond 1 to E, or more than the groups hold.
    Cost: T·E·itemsize bytes read; in cache.
    Source: top k before softmax: Shazeer et al. 2017, arXiv:1701.06538, Jiang et al. 2024,
    arXiv:2401.04088; after it: Fedus et al. 2021, arXiv:2101.03961; groups: DeepSeek-V2,
    arXiv:2405.04434; sigmoid, correction: DeepSeek-V3, arXiv:2412.19437.
    """
    check_route(logits, k, groups, top_groups)
    x = logits.float()
    shares = x.sigmoid() if sigmoid else x.softmax(-1)
    wish = x if correction is None else shares + correction
    if groups > 1:
        wish = _of_best_groups(wish, groups, top_groups, correction is not None)
    experts = wish.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = shares.gather(1, experts)
    if normalize and sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    elif normalize:
        weights = x.gather(1, experts).softmax(-1)
    weights = weights * scale
    if each is not None:
        weights = weights * each[experts]
    return weights.contiguous(), experts.to(torch.int32)


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

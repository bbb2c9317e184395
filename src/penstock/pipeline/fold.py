"""Scales of a matrix's input columns, moved into what comes before: the function stays the same.

qkv, up   the norm before them: weight (and bias) / s
out       the rows of v: an attention's output is linear in its values
down      the rows of up, beside the gate
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec

Tensors = dict[str, Tensor]
"""A layer's tensors by their parameters' names in it."""

NORMS = {"attention.qkv": "attention_norm", "mlp.up": "mlp_norm"}


def foldable(layer: LayerSpec) -> list[str]:
    """The matrices of a layer whose columns can be scaled, in the order of their computation."""
    found = []
    own_norms = layer.pre_norm and not layer.one_norm
    if own_norms:
        found.append("attention.qkv")
    if not layer.attention.value_norm:  # which takes scales away
        found.append("attention.out")
    if own_norms and layer.mlp.intermediate:
        found.append("mlp.up")
    if layer.mlp.gated:  # else an activation stands between
        found.append("mlp.down")
    return found


def tie(layer: LayerSpec, module: str) -> Callable[[Tensor], Tensor] | None:
    """How scales are made equal where heads of queries share one of values; None: all are free."""
    a = layer.attention
    if module != "attention.out" or a.num_heads == a.num_kv_heads:
        return None
    return lambda raw: _repeat(_per_value(raw, a), a)


def _per_value(scales: Tensor, a: AttentionSpec) -> Tensor:
    """[H · Dh] → [Hkv, 1, Dh], the geometric mean."""
    heads = scales.view(a.num_kv_heads, -1, a.kept_dim)
    return heads.clamp(min=1e-12).log().mean(1, keepdim=True).exp()


def _repeat(scales: Tensor, a: AttentionSpec) -> Tensor:
    return scales.expand(-1, a.num_heads // a.num_kv_heads, -1).reshape(-1)


def fold(
    tensors: Tensors, spec: DecoderSpec, layer: LayerSpec, module: str, scales: Tensor
) -> set[str]:
    """Scale the columns of `module` by `scales` [K] and what comes before by their inverse.

    Changes `tensors` and returns the names of those it replaced. Exact where scales are powers of
    two; else what is rounded once more is a norm's weight or a row, in float32.
    """
    name = f"{module}.weight"
    before: list[tuple[str, Tensor]] = []
    if module in NORMS:
        norm, offset = f"{NORMS[module]}.weight", spec.norm.offset
        before.append((norm, (tensors[norm].float() + offset) / scales - offset))
        if spec.norm.bias:
            bias = f"{NORMS[module]}.bias"
            before.append((bias, tensors[bias].float() / scales))
    else:
        source, rows = _rows_before(layer, module, scales)
        for part in ("weight", "bias"):
            whole = tensors.get(f"{source}.{part}")
            if whole is not None:
                before.append((f"{source}.{part}", _divide_last(whole.float(), rows)))
    tensors[name] = tensors[name].float() * scales
    tensors.update(before)
    return {name, *(changed for changed, _ in before)}


def _rows_before(layer: LayerSpec, module: str, scales: Tensor) -> tuple[str, Tensor]:
    if module == "mlp.down":
        return "mlp.up", scales
    a = layer.attention
    by_head = scales.view(a.num_kv_heads, -1, a.kept_dim)
    assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
    return "attention.qkv", by_head[:, 0].reshape(-1)


def _divide_last(whole: Tensor, rows: Tensor) -> Tensor:
    """The last len(rows) rows of `whole` over `rows`: v's of qkv, up's of gate and up."""
    changed = whole.clone()
    changed[-len(rows) :] /= rows.view(-1, *([1] * (whole.dim() - 1)))
    return changed

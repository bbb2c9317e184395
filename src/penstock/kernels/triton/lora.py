"""What low-rank adapters add to a product: shrink, then expand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, dot, implement, power_of_2
from penstock.ops.lora import check_adapters

MAX_RANK = 128
"""A rank's row of sums stays in registers up to it."""

SPANS = 8
"""Into how many parts K is split at most, each with programs of its own."""


@triton.jit
def _next(ids, COUNT: tl.constexpr):
    """ids without the COUNT largest distinct ones: -1 stands in their place."""
    for _ in tl.static_range(COUNT):
        ids = tl.where(ids == tl.max(ids, axis=0), -1, ids)
    return ids


@triton.jit
def _tokens_of(adapters, tokens, ROWS: tl.constexpr, LANES: tl.constexpr):
    """A program's tile of tokens, and the adapters there that it takes first.

    LANES programs share a tile, and take its distinct adapters in turn.
    """
    lane = tl.program_id(0) % LANES
    t = tl.program_id(0) // LANES * ROWS + tl.arange(0, ROWS)
    ids = tl.load(adapters + t, mask=t < tokens, other=-1)
    for _ in range(lane):
        ids = _next(ids, 1)
    return t.to(tl.int64), ids


@triton.jit
def _shrink(
    x, down, adapters, sums,
    tokens, rank, depth, stride_x, stride_adapter, stride_down,
    ROWS: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    t, ids = _tokens_of(adapters, tokens, ROWS, LANES)
    r, k = tl.arange(0, R), tl.arange(0, STEP)
    begin = tl.program_id(1) * SPAN
    adapter = tl.max(ids, axis=0)
    while adapter >= 0:
        mine = ids == adapter
        x_at = x + t[None, :] * stride_x + k[:, None]
        own = down + adapter.to(tl.int64) * stride_adapter
        d_at = own + r[:, None] * stride_down + k[None, :]
        total = tl.zeros((R, ROWS), dtype=tl.float32)
        for i in range(begin, tl.minimum(begin + SPAN, depth), STEP):
            inside = i + k < depth
            part = tl.load(d_at + i, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
            rows = tl.load(x_at + i, mask=inside[:, None] & mine[None, :], other=0.0)
            total = dot(part, rows, total)
        at = (t * tl.num_programs(1) + tl.program_id(1))[None, :] * R + r[:, None]
        tl.store(sums + at, total, mask=mine[None, :] & (r < rank)[:, None])
        ids = _next(ids, LANES)
        adapter = tl.max(ids, axis=0)


@triton.jit
def _expand(
    sums, up, adapters, scaling, y,
    tokens, rank, features, stride_adapter, stride_up, stride_y,
    ROWS: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, FEATURES: tl.constexpr,
    PARTS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    t, ids = _tokens_of(adapters, tokens, ROWS, LANES)
    r, n = tl.arange(0, R), tl.arange(0, FEATURES)
    begin = tl.program_id(1) * PARTS * FEATURES
    adapter = tl.max(ids, axis=0)
    while adapter >= 0:
        mine = ids == adapter
        hidden = tl.zeros((R, ROWS), dtype=tl.float32)
        for span in tl.static_range(SPANS):
            at = (t * SPANS + span)[None, :] * R + r[:, None]
            hidden += tl.load(sums + at, mask=mine[None, :] & (r < rank)[:, None], other=0.0)
        factor = tl.load(scaling + adapter)
        own = up + adapter.to(tl.int64) * stride_adapter
        for i in range(begin, tl.minimum(begin + PARTS * FEATURES, features), FEATURES):
            inside = i + n < features
            u_at = own + (i + n).to(tl.int64)[:, None] * stride_up + r[None, :]
            part = tl.load(u_at, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
            nothing = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
            change = dot(part, hidden.to(part.dtype), nothing)
            y_at = y + t[None, :] * stride_y + (i + n)[:, None]
            kept = inside[:, None] & mine[None, :]
            before = tl.load(y_at, mask=kept, other=0.0).to(tl.float32)
            after = tl.fma(change, nothing + factor, before)
            tl.store(y_at, after.to(y.dtype.element_ty), mask=kept)
        ids = _next(ids, LANES)
        adapter = tl.max(ids, axis=0)


def span_of(depth: int) -> int:
    """How much of K a program of the first kernel sums: by K alone."""
    return max(512, power_of_2(-(-depth // SPANS)))


@implement("lora_add_")
def lora_add_(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, scaling: Tensor
) -> None:
    """`ops.lora_add_`: tiles of tokens meet each adapter they have, one after the other.

    A tile of one adapter is one product; in a mixed one each product is kept where it belongs, so
    that a row's bits are the same in both. Up to 16 programs share a tile's adapters. The first
    kernel leaves sums over spans of K in float32, the second adds them in order.
    """
    check_adapters(y, x, down, up, adapters, scaling)
    if down.shape[1] > MAX_RANK:
        raise RuntimeError(
            f"lora_add_: rank {down.shape[1]} is beyond {MAX_RANK}; merge such an adapter into the "
            "weights"
        )
    whole = all(each.shape[-1] == 1 or each.stride(-1) == 1 for each in (y, x, down, up))
    if down.dim() != 3 or not whole:
        raise RuntimeError(
            "lora_add_: on a GPU adapters are [A, R, K] and [A, N, R], and rows of all are "
            f"contiguous; down {list(down.shape)} has strides {down.stride()}, up "
            f"{list(up.shape)} {up.stride()}, x {x.stride()}, y {y.stride()}"
        )
    tokens, depth = x.shape
    rank, features = down.shape[1], y.shape[1]
    if not (tokens and rank and down.shape[0]):
        return
    few, wide = tokens <= 256, x.dtype is torch.float32
    large = 16 if wide else 32 if rank > 64 else 64  # what registers hold
    rows, lanes = (16, min(16, power_of_2(tokens, 1))) if few else (large, 4)
    shared = {"ROWS": rows, "LANES": lanes, "R": power_of_2(rank)}
    programs = cdiv(tokens, rows) * lanes
    span = span_of(depth)
    spans = cdiv(depth, span)
    sums = torch.empty((tokens, spans, shared["R"]), dtype=torch.float32, device=x.device)
    _shrink[(programs, spans)](
        x, down, adapters, sums, tokens, rank, depth, x.stride(0), down.stride(0), down.stride(1),
        STEP=min(power_of_2(depth), 32 if wide else 64), SPAN=span, **shared,
    )  # fmt: skip
    parts = 1 if few else 8
    _expand[(programs, cdiv(features, 64 * parts))](
        sums, up, adapters, scaling, y,
        tokens, rank, features, up.stride(0), up.stride(1), y.stride(0),
        FEATURES=64, PARTS=parts, SPANS=spans, **shared,
    )  # fmt: skip

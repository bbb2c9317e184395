"""Section: operators at the sizes of known models, each beside its floor and torch's own kernel.

A floor is the longer of the bytes that must be moved at the measured read bandwidth and the
multiplications at the measured rate. Kernels are timed in turns, from a cold L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from benchmarks.gpu.document import Context, Item, is_fatal
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, matrices
from benchmarks.gpu.warm import Task, warm
from torch import Tensor
from torch.nn import functional

from penstock.kernels.triton import launchers
from penstock.quant import ROWS, Dense, WeightFormat, parse_quantization
from penstock.roofline.timing import Flush, Run, Timed, side_by_side

ROW_COUNTS = (1, 16, 64, 512, 4096)
FORMS = ("bfloat16", "w4a16-g128", "w8a16", "fp8", "fp8-w8a8", "w8a8")
SLAB = 32
"""Rows of a matrix that are rounded and packed; the others repeat them."""


def items(context: Context) -> Iterator[Item]:
    shapes, forms = {"8b": LLAMA_8B, "1b": LLAMA_1B}, FORMS
    if context.dry:
        shapes, forms = {"tiny": TINY}, ("bfloat16", "w8a8")
    yield "compile", lambda: compiled(context, shapes, forms)
    yield "attention-decode", lambda: decode_attention(context)
    yield "attention-prefill", lambda: prefill_attention(context)
    for size, shape in shapes.items():
        for form in forms:
            name, given = f"linear-{size}-{form}", (shape, form)
            yield name, lambda given=given: linear(context, *given)
    yield "small", lambda: small(context)


def missing(name: str) -> dict[str, str] | None:
    """What to say where an operator has no kernel."""
    return None if name in launchers() else {"missing": f"no Triton kernel for {name}"}


def compare(context: Context, runs: Mapping[str, Run], floor_s: float) -> dict[str, Any]:
    """Time what runs, in turns, `penstock` among it; what raises is named with its reason."""
    found: dict[str, Any] = {"floor_s": floor_s}
    able: dict[str, Run] = {}
    for name, run in runs.items():
        try:
            run()
            if context.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # a peer that hasn't this form; ours, told apart below
            if is_fatal(error):
                raise
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        else:
            able[name] = run
    if "flush" not in context.scratch:
        context.scratch["flush"] = Flush(context.device)
    how: dict[str, Any] = {"rounds": 3, "repeats": 10, "flush": context.scratch["flush"]}
    if context.dry:
        how |= {"rounds": 1, "repeats": 1, "warm_up": 0}
    for name, timed in side_by_side(able, context.device, **how).items():
        found[name] = _entry(timed, floor_s)
    ours = found.get("penstock", {}).get("seconds")
    peers = [e["seconds"] for n, e in found.items() if n not in ("penstock", "floor_s")
             and "seconds" in e]  # fmt: skip
    if ours and peers:
        found["speed_of_best_peer"] = min(peers) / ours
    return found


def _entry(timed: Timed, floor_s: float) -> dict[str, float]:
    return {
        "seconds": timed.median_s,
        "least_s": timed.least_s,
        "spread": timed.spread,
        "achieved": floor_s / timed.median_s,
    }


# ── products ─────────────────────────────────────────────────────────────────────────────────


def format_called(form: str) -> WeightFormat:
    stored: WeightFormat = Dense(torch.bfloat16)
    if form != "bfloat16":
        stored = parse_quantization(form)
    return stored.stored_as(ROWS)


def packed_matrix(
    stored: WeightFormat, n: int, k: int, gated: bool, device: torch.device
) -> dict[str, Tensor]:
    """Random values as `stored` has them; a slab of rows over and over."""
    slab = torch.randn(SLAB, k, generator=torch.Generator().manual_seed(n)) / k**0.5
    rows = n * (2 if gated else 1)
    packed = {}
    for name, tensor in stored.pack(slab).items():
        whole = tensor.to(device)
        if tensor.dim() == 2 and tensor.shape[0] == SLAB:
            parts = -(-rows // SLAB)
            bytes_of = whole.view(torch.uint8) if whole.dtype.itemsize == 1 else whole
            whole = bytes_of.repeat(parts, 1)[:rows].contiguous().view(whole.dtype)
        packed[name] = whole
    return packed


def call_of(
    stored: WeightFormat, packed: Mapping[str, Tensor], x: Tensor, n: int, gated: bool
) -> Callable[[], Tensor]:
    """Ours: the launcher itself, as the dispatcher calls it."""
    launch = launchers()["linear"]
    row_codes: int = getattr(stored, "row_codes")  # noqa: B009  of every operator's format
    levels: int = getattr(stored, "levels")  # noqa: B009
    activation = 1 if gated else 0
    return lambda: launch(
        x, packed["weight"], packed.get("scale"), packed.get("zero"), None, n, row_codes, None, 0.0,
        activation, gated, None, levels, packed.get("outer"), packed.get("input_scale"),
    )  # fmt: skip


def floor_of_product(
    context: Context, stored: WeightFormat, rows: int, n: int, k: int, gated: bool
) -> float:
    width = n * (2 if gated else 1)
    moved = stored.nbytes(width, k) + 2 * rows * (k + n)
    peaks = context.peaks
    return max(moved / peaks.read_bytes_per_s, 2 * rows * width * k / peaks.of(stored.compute))


def compiled(
    context: Context, shapes: Mapping[str, dict[str, Any]], forms: Sequence[str]
) -> dict[str, Any]:
    """Compile the products' kernels side by side."""
    gone = missing("linear")
    if gone:
        return gone
    tasks = [
        Task(form, (matrix,), row_counts(context, name))
        for form in forms
        for shape in shapes.values()
        for name, matrix in matrices(shape).items()
    ]
    said = warm(context, tasks, 0.4 * context.left_s)
    wrong = {f"{t.form} {t.shapes[0]}": s for t, s in zip(tasks, said, strict=True) if s}
    return {"tasks": len(tasks), "late": said.count(None), "wrong": wrong}


def row_counts(context: Context, matrix: str) -> tuple[int, ...]:
    """Numbers of rows that a matrix is tried with; the head meets only those that are sampled."""
    if context.dry:
        return (1,) if matrix in ("qkv", "gate_up") else ()
    return tuple(rows for rows in ROW_COUNTS if matrix != "head" or rows <= 512)


def linear(context: Context, shape: dict[str, Any], form: str) -> dict[str, Any]:
    """Every matrix of a model at every number of rows."""
    gone = missing("linear")
    if gone:
        return gone
    stored, found = format_called(form), {}
    for name, (n, k, gated) in matrices(shape).items():
        packed = packed_matrix(stored, n, k, gated, context.device)
        dense = torch.randn(n * (2 if gated else 1), k, device=context.device).to(torch.bfloat16)
        for rows in row_counts(context, name):
            if context.due(2.0):
                found[f"{name}-{rows}"] = {"skipped": "no time was left"}
                continue
            x = torch.randn(rows, k, device=context.device).to(torch.bfloat16)
            runs: dict[str, Run] = {"penstock": call_of(stored, packed, x, n, gated)}
            runs |= _peers(form, x, dense, gated)
            floor = floor_of_product(context, stored, rows, n, k, gated)
            found[f"{name}-{rows}"] = compare(context, runs, floor)
        del packed, dense
    return found


def _gate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _peers(form: str, x: Tensor, dense: Tensor, gated: bool) -> dict[str, Run]:
    """torch's own kernels for the same product: cuBLAS, and what it has for few bits."""
    after: Callable[[Tensor], Tensor] = _gate if gated else lambda h: h
    runs: dict[str, Run] = {"cublas-bfloat16": lambda: after(x @ dense.t())}
    if form.startswith("fp8"):
        w8, x8 = dense.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
        a = torch.ones(x.shape[0], 1, device=x.device)
        b = torch.ones(1, dense.shape[0], device=x.device)
        runs["scaled_mm-rowwise"] = lambda: after(
            torch._scaled_mm(x8, w8.t(), a, b, out_dtype=torch.bfloat16)
        )
    if form == "w8a8" and x.shape[0] > 16:
        w8 = dense.clamp(-1, 1).mul(127).to(torch.int8)
        x8 = x.clamp(-1, 1).mul(127).to(torch.int8)
        runs["int_mm"] = lambda: torch._int_mm(x8, w8.t())
    if form.startswith("w4a16") and x.device.type == "cuda":
        runs["int4pack_mm"] = made_at_first(lambda: _int4pack(x, dense, after))
    return runs


def _int4pack(x: Tensor, dense: Tensor, after: Callable[[Tensor], Tensor]) -> Run:
    """torch's own int4 beside bfloat16, in groups of 128."""
    n, k = dense.shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=x.device)
    tiles = torch._convert_weight_to_int4pack(codes, 8)
    scales = torch.ones(k // 128, n, 2, dtype=torch.bfloat16, device=x.device)
    return lambda: after(torch._weight_int4pack_mm(x, tiles, 128, scales))


def made_at_first(make: Callable[[], Run]) -> Run:
    """Prepared when it is first run, where what it raises is that run's."""
    made: list[Run] = []

    def run() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return run


# ── attention ────────────────────────────────────────────────────────────────────────────────


def _paged(
    batch: int, length: int, heads: int, dim: int, block: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values in blocks that lie in no order, and the table of them."""
    each = -(-length // block)
    keys, values = (
        torch.randn(batch * each, heads, block, dim, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    table = torch.randperm(batch * each, device=device).view(batch, each).to(torch.int32)
    return keys, values, table


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Run]:
    """torch's scaled-dot-product attention by each of its kernels; q, k, v [B, H, T, D]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: Any, spread: bool) -> Run:
        kk, vv = (
            x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if spread else x for x in (k, v)
        )

        def run() -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, kk, vv, is_causal=causal, enable_gqa=not spread
                )

        return run

    if q.device.type != "cuda":
        return {"sdpa-math": by(SDPBackend.MATH, False)}
    runs = {"sdpa-flash": by(SDPBackend.FLASH_ATTENTION, False)}
    runs["sdpa-cudnn"] = by(SDPBackend.CUDNN_ATTENTION, False)
    if k.numel() < 1 << 28:  # which has no grouped heads: keys of each query head
        runs["sdpa-efficient"] = by(SDPBackend.EFFICIENT_ATTENTION, True)
    return runs


def decode_attention(context: Context) -> dict[str, Any]:
    """One query a sequence over 32k tokens; `achieved_of_copy`: of the copy bandwidth."""
    gone = missing("paged_attention")
    if gone:
        return gone
    heads, kv_heads, dim, length, block = 32, 8, 128, 32768, 32
    batches: tuple[int, ...] = (1, 8, 64)
    if context.dry:
        heads, kv_heads, dim, length, batches = 4, 2, 32, 96, (1, 2)
    found: dict[str, Any] = {"context": length}
    launch, device = launchers()["paged_attention"], context.device
    for batch in batches:
        keys, values, table = _paged(batch, length, kv_heads, dim, block, device)
        q = torch.randn(batch, heads, dim, device=device).to(torch.bfloat16)
        start = torch.arange(batch + 1, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        given = (q, keys, values, start, lengths, table, dim**-0.5)
        moved = 4 * batch * length * kv_heads * dim
        runs: dict[str, Run] = {"penstock": lambda given=given: launch(*given)}
        shape = (batch, length, kv_heads, dim)
        dense = [x.view(shape).transpose(1, 2) for x in (keys, values)]
        runs |= _sdpa(q.unsqueeze(2), *dense, causal=False)
        one = compare(context, runs, moved / context.peaks.read_bytes_per_s)
        seconds = one.get("penstock", {}).get("seconds")
        if seconds:
            one["achieved_of_copy"] = moved / context.peaks.copy_bytes_per_s / seconds
        found[f"batch-{batch}"] = one
        del keys, values, dense, runs, given
    return found


def prefill_attention(context: Context) -> dict[str, Any]:
    """A prompt of 4,096 tokens by itself, and as a chunk behind 4,096 others."""
    gone = missing("paged_attention")
    if gone:
        return gone
    heads, kv_heads, dim, count, block = 32, 8, 128, 4096, 32
    if context.dry:
        heads, kv_heads, dim, count = 4, 2, 32, 64
    launch, device, found = launchers()["paged_attention"], context.device, {}
    for before in (0, count):
        length = before + count
        keys, values, table = _paged(1, length, kv_heads, dim, block, device)
        q = torch.randn(count, heads, dim, device=device).to(torch.bfloat16)
        start = torch.tensor([0, count], dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        given = (q, keys, values, start, lengths, table, dim**-0.5)
        pairs = count * before + count * (count + 1) // 2
        runs: dict[str, Run] = {"penstock": lambda given=given: launch(*given)}
        if not before:
            dense = [x.view(1, length, kv_heads, dim).transpose(1, 2) for x in (keys, values)]
            runs |= _sdpa(q.transpose(0, 1)[None], *dense, causal=True)
        floor = 4 * heads * dim * pairs / context.peaks.of("bfloat16")
        found[f"behind-{before}"] = compare(context, runs, floor)
    return found


# ── rows ─────────────────────────────────────────────────────────────────────────────────────


def small(context: Context) -> dict[str, Any]:
    """What moves only activations: norms, logits."""
    device, found = context.device, {}
    dim, vocabulary = (64, 512) if context.dry else (4096, 128256)
    read = context.peaks.read_bytes_per_s
    there = launchers()
    weight = torch.ones(dim, device=device)
    narrow = weight.to(torch.bfloat16)
    for rows in (1, 2) if context.dry else (1, 64, 4096):
        x = torch.randn(rows, dim, device=device).to(torch.bfloat16)
        if "rms_norm" in there:
            runs: dict[str, Run] = {
                "penstock": lambda x=x: there["rms_norm"](x, weight, 1e-5),
                "rms_norm": lambda x=x: functional.rms_norm(x, (dim,), narrow, 1e-5),
            }
            found[f"rms_norm-{rows}"] = compare(context, runs, 4 * rows * dim / read)
    for rows in (1,) if context.dry else (1, 8, 64):
        logits = torch.randn(rows, vocabulary, device=device)
        for name, peer in (("argmax", lambda y: y.max(-1)), ("top_k", lambda y: y.topk(64))):
            if name not in there:
                continue
            given = (logits,) if name == "argmax" else (logits, 64)
            runs = {
                "penstock": lambda name=name, given=given: there[name](*given),
                "torch": lambda peer=peer, logits=logits: peer(logits),
            }
            found[f"{name}-{rows}"] = compare(context, runs, 4 * rows * vocabulary / read)
    return found

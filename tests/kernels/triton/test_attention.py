from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels.triton import attention, launchers
from penstock.kernels.triton.attention import Sizes, attend
from penstock.ops.rotary_cache import stored
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ONE_BYTE = 2e-2
"""bfloat16 queries: weights are rounded to it after int8's scales have multiplied them."""

SMALL = Sizes(span=32, keys=16, rows=16, many_rows=16, stages=2, many_stages=2)
"""Short spans and tiles, so that a few positions cross many of them."""

RAGGED = ((1, 70), (18, 35), (3, 5), (1, 1))
"""(queries, positions) of each sequence: decoding, chunks, verifications."""

REFERENCE = ops.op("paged_attention").reference


class Case:
    """Keys and values of some sequences in scattered blocks, NaN wherever nobody may look."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: tuple[int, int],
        dim: int,
        ragged: tuple[tuple[int, int], ...] = RAGGED,
        stored_as: torch.dtype | None = None,
        block_size: int = 16,
    ) -> None:
        torch.manual_seed(0)
        self.dtype, self.block_size, self.ragged = dtype, block_size, ragged
        count, kv_heads = heads
        counts, lengths = zip(*ragged, strict=True)
        self.q = torch.randn(sum(counts), count + 1, dim, device=DEVICE).to(dtype)[:, :count]
        used = [-(-length // block_size) for length in lengths]
        order = iter((torch.randperm(sum(used) + 5) + 1).tolist())
        blocks = [[next(order) for _ in range(n)] for n in used]
        width = max(used) + 3
        table = [b + [2**30] * (width - len(b)) for b in blocks]  # read by nobody beyond its end
        self.table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
        shape = (sum(used) + 6, kv_heads, block_size, dim)
        kind = stored_as or dtype
        empty = torch.full(shape, float("nan")) if kind.is_floating_point else torch.full(shape, 99)
        self.caches = [empty.to(kind).to(DEVICE) for _ in range(2)]
        self.scales: list[Tensor | None] = [None, None]
        if kind is torch.int8:
            nan = torch.full(shape[:3], float("nan"), dtype=torch.float16, device=DEVICE)
            self.scales = [nan.clone(), nan.clone()]
        torch.manual_seed(1)  # the same keys whatever blocks they lie in
        for b, length in enumerate(lengths):
            at = torch.arange(length, device=DEVICE)
            block, offset = self.table[b].long()[at // block_size], at % block_size
            for cache, scale in zip(self.caches, self.scales, strict=True):
                x = torch.randn(length, kv_heads, dim, device=DEVICE).to(dtype)
                held = cache.view(torch.uint8) if kind is torch.float8_e4m3fn else cache
                held[block, :, offset] = stored(x, kind, scale, block, offset)

    def arguments(self, chosen: list[tuple[int, int, int]] | None = None) -> tuple[Tensor, ...]:
        """What the operator takes; chosen: (sequence, first query, queries) of each part."""
        counts = [count for count, _ in self.ragged]
        parts = chosen or [(b, 0, count) for b, count in enumerate(counts)]
        rows = [self.q[sum(counts[:b]) + first :][:count] for b, first, count in parts]
        lengths = [self.ragged[b][1] - counts[b] + first + count for b, first, count in parts]
        starts = [0, *torch.tensor([count for *_, count in parts]).cumsum(0).tolist()]
        of = torch.tensor([b for b, *_ in parts], device=DEVICE)
        return (
            torch.cat(rows),
            *self.caches,
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            self.table[of],
        )


def small(
    args: tuple[Tensor, ...],
    scales: list[Tensor | None],
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cut: Sizes = SMALL,
    causal: bool = True,
    sink_tokens: int = 0,
) -> Tensor:
    q, key, value, query_start, context_len, table = args
    return attend(
        q, (key, value), (scales[0], scales[1]), (query_start, context_len), table,
        q.shape[2] ** -0.5, window, softcap, sinks, cut, causal, sink_tokens,
    )  # fmt: skip


def expected(
    args: tuple[Tensor, ...],
    scales: list[Tensor | None],
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    scale = args[0].shape[2] ** -0.5
    return REFERENCE(*args, scale, window, softcap, sinks, *scales, sink_tokens=sink_tokens)


def test_few_queries_without_room_for_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken as many are, and are the same to the last bit."""
    case = Case(torch.float16, (4, 2), 16)
    decoding = [(b, count - 1, 1) for b, (count, _) in enumerate(case.ragged)]
    for args in (case.arguments(), case.arguments(decoding)):
        few = small(args, case.scales)
        need = attention.workspace(args[0], args[5], case.block_size, SMALL, SMALL.rows // 2)
        queries = args[0].shape[0]
        assert need == queries * 4 * 4 * 4 * (16 + 2)  # heads, spans, bytes
        for room in (need, need - 1):
            monkeypatch.setattr(attention, "WORKSPACE", room)
            launched: list[str] = []
            monkeypatch.setattr(attention, "_launch_few", noting(launched, attention._launch_few))
            assert small(args, case.scales).equal(few)
            assert bool(launched) == (room == need)
            monkeypatch.undo()


def noting(launched: list[str], launch: Callable[..., None]) -> Callable[..., None]:
    """`launch`, with a note that it was."""

    def run(*arguments: Any) -> None:
        launched.append("few")
        launch(*arguments)

    return run


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "window", "softcap", "sinks"),
    [
        (torch.float32, (2, 2), 64, 0, 0.0, False),
        (torch.float32, (4, 1), 80, 40, 20.0, True),
        (torch.float16, (7, 1), 128, 0, 20.0, False),
        (torch.float16, (4, 2), 64, 7, 0.0, True),
        (torch.bfloat16, (4, 1), 128, 0, 0.0, False),
        (torch.bfloat16, (7, 1), 64, 33, 5.0, True),
        (torch.float32, (2, 1), 8, 0, 0.0, False),
        (torch.bfloat16, (4, 2), 8, 40, 0.0, True),
    ],
)
def test_reference(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, window: int, softcap: float, sinks: bool
) -> None:
    case = Case(dtype, heads, dim)
    extra = torch.randn(heads[0], device=DEVICE) if sinks else None
    options = (case.scales, window, softcap, extra)
    found = small(case.arguments(), *options)
    assert found.dtype is dtype
    torch.testing.assert_close(
        found, expected(case.arguments(), *options), rtol=CLOSE[dtype], atol=CLOSE[dtype]
    )


SUNK = [
    (torch.float32, (2, 2), 64, 12, 0.0, False, 4, None),
    (torch.float32, (4, 1), 80, 7, 20.0, True, 1, None),
    (torch.float16, (7, 1), 128, 20, 0.0, False, 19, None),
    (torch.bfloat16, (4, 2), 16, 5, 0.0, True, 40, None),
    (torch.float16, (4, 2), 64, 12, 0.0, False, 4, torch.int8),
    (torch.float32, (4, 2), 16, 30, 0.0, False, 4, torch.float8_e4m3fn),
]
"""dtype, heads, dim, window, soft cap, learned sinks, sink tokens, the cache's dtype."""


@pytest.mark.parametrize("given", SUNK)
def test_first_tokens_from_afar(given: tuple[Any, ...]) -> None:
    """Beside a window, by queries of their own; the same bits alone, in parts and in any batch."""
    dtype, (count, kv_heads), dim, window, softcap, learned, first, kind = given
    case = Case(dtype, (2 * count, kv_heads), dim, stored_as=kind)
    extra = torch.randn(count, device=DEVICE) if learned else None
    options: dict[str, Any] = {
        "window": window, "softcap": softcap, "sinks": extra, "sink_tokens": first
    }  # fmt: skip
    found = small(case.arguments(), case.scales, **options)
    assert found.shape == (case.q.shape[0], count * dim)
    want = expected(case.arguments(), case.scales, **options)
    torch.testing.assert_close(found, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    at = 0
    for b, (queries, length) in enumerate(case.ragged):
        reach = first + window
        if length > reach:  # or it changes nothing
            one = {**options, "sink_tokens": 0, "window": 0}
            q, *rest = case.arguments([(b, 0, queries)])
            plain = small((q[:, :count], *rest), case.scales, **one)
            within = max(reach - (length - queries), 0)
            assert plain[:within].equal(found[at : at + within])
            assert not plain[within:].equal(found[at + within : at + queries])
        for begin in range(0, queries, max(queries // 3, 1)):
            part = case.arguments([(b, begin, 1)])
            assert small(part, case.scales, **options).equal(found[at + begin : at + begin + 1])
        at += queries


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_all_see_all(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Patches of a picture; what comes doesn't depend on what is beside it."""
    case = Case(dtype, heads, 72, ragged=((50, 50), (70, 70), (1, 1)))
    found = small(case.arguments(), case.scales, causal=False)
    args = case.arguments()
    wanted = REFERENCE(*args, args[0].shape[2] ** -0.5, causal=False)
    torch.testing.assert_close(found, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    alone = small(case.arguments([(1, 0, 70)]), case.scales, causal=False)
    assert torch.equal(alone, found[50:120])
    with pytest.raises(KernelError, match="isn't causal has no window, but one of 7"):
        small(case.arguments(), case.scales, 7, causal=False)


@pytest.mark.parametrize(
    ("kind", "dim"), [(torch.float8_e4m3fn, 64), (torch.int8, 80), (torch.int8, 8)]
)
def test_one_byte(kind: torch.dtype, dim: int) -> None:
    case = Case(torch.bfloat16, (4, 1), dim, stored_as=kind)
    found = small(case.arguments(), case.scales)
    wanted = expected(case.arguments(), case.scales)
    torch.testing.assert_close(found, wanted, rtol=ONE_BYTE, atol=ONE_BYTE)


@pytest.mark.parametrize(
    ("dtype", "kind", "window", "softcap", "sinks"),
    [
        (torch.float32, None, 0, 0.0, False),
        (torch.float16, None, 40, 20.0, True),
        (torch.bfloat16, torch.int8, 30, 0.0, False),
        (torch.bfloat16, torch.float8_e4m3fn, 0, 20.0, True),
    ],
)
def test_bits(
    dtype: torch.dtype, kind: torch.dtype | None, window: int, softcap: float, sinks: bool
) -> None:
    """Alone, in a chunk of any size, beside others, in any order: the same bits."""
    count = 12  # of 8, two heads each, a tile is full
    case = Case(dtype, (2, 1), 64, ragged=((1, 50), (count, 75), (3, 5)), stored_as=kind)
    options = (case.scales, window, softcap, torch.randn(2, device=DEVICE) if sinks else None)
    together = small(case.arguments(), *options)[1 : 1 + count]
    for parts in ([(1, 0, 12)], [(1, 0, 9), (1, 9, 3)], [(1, i, 1) for i in range(count)]):
        assert torch.equal(small(case.arguments(parts), *options), together)
    for first in (0, 7):
        alone = small(case.arguments([(1, first, 1)]), *options)
        assert torch.equal(alone, together[first : first + 1])


def test_bits_of_tables_of_one_span() -> None:
    """Where no more than one span fits, nothing is joined, and the bits are the same."""
    case = Case(torch.float16, (4, 2), 64, ragged=((1, 30), (12, 20)))
    q, key, value, start, length, table = case.arguments()
    narrow = small((q, key, value, start, length, table[:, :2]), case.scales)
    assert torch.equal(narrow, small((q, key, value, start, length, table), case.scales))


@pytest.mark.parametrize("window", [0, 45])
@pytest.mark.parametrize("kind", [None, torch.int8])
def test_bits_of_runs_and_of_blocks(
    kind: torch.dtype | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many spans a program takes, and wherever blocks begin and end: the same bits."""
    ragged = ((1, 200), (2, 77), (1, 33), (12, 90))
    wanted = None
    for block_size in (4, 8, 16, 32):  # of a tile of 16: a quarter, half, all, and half of one
        case = Case(torch.bfloat16, (2, 1), 32, ragged, stored_as=kind, block_size=block_size)
        for programs, slots in ((1056, 264), (4, 264), (12, 264), (1056, 1)):
            monkeypatch.setattr(attention, "PROGRAMS", programs)
            monkeypatch.setattr(attention, "SLOTS", slots)
            found = small(case.arguments(), case.scales, window)
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted), (block_size, programs, slots)
    torch.testing.assert_close(
        wanted, expected(case.arguments(), case.scales, window), rtol=ONE_BYTE, atol=ONE_BYTE
    )


def test_whole_sizes() -> None:
    """As a model runs it: spans of 256, through the operator's own arguments."""
    case = Case(torch.float32, (2, 1), 64, ragged=((1, 300), (70, 280)), block_size=32)
    args = (*case.arguments(), 0.125)
    found = launchers()["paged_attention"](*args)
    torch.testing.assert_close(found, REFERENCE(*args), rtol=2e-5, atol=2e-5)
    alone = (*case.arguments([(1, 69, 1)]), 0.125)
    assert torch.equal(launchers()["paged_attention"](*alone), found[70:71])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_bits_of_whole_sizes(kind: torch.dtype, dim: int) -> None:
    """As a GPU computes it: matrix units, whole tiles, one query alone and any chunk the same."""
    count, length = 300, 1000
    ragged = ((1, 700), (count, length), (5, 90))
    case = Case(torch.bfloat16, (8, 2), dim, ragged, stored_as=kind, block_size=32)
    more = {"key_scale": case.scales[0], "value_scale": case.scales[1], "window": 600}
    run = launchers()["paged_attention"]
    together = run(*case.arguments(), 0.1, **more)
    wanted = REFERENCE(*case.arguments(), 0.1, **more)
    torch.testing.assert_close(together, wanted, rtol=ONE_BYTE, atol=ONE_BYTE)
    chunk = together[1 : 1 + count]
    for parts in ([(1, 0, 157), (1, 157, 143)], [(1, i, 1) for i in range(count)]):
        assert torch.equal(run(*case.arguments(parts), 0.1, **more), chunk)
    assert torch.equal(run(*case.arguments([(1, 99, 1)]), 0.1, **more), chunk[99:100])


def test_padding() -> None:
    """A sequence with a query but no position gives zeros and disturbs nobody."""
    case = Case(torch.float32, (2, 1), 64, ragged=((1, 40), (1, 3)))
    q, key, value, start, length, table = case.arguments()
    padded = torch.cat((q, torch.full_like(q[:1], float("nan"))))
    start = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([40, 3, 0], dtype=torch.int32, device=DEVICE)
    found = small((padded, key, value, start, length, table[[0, 1, 0]]), case.scales)
    assert torch.equal(found[:2], small(case.arguments(), case.scales))
    assert torch.equal(found[2], torch.zeros_like(found[2]))
    narrow = (padded[1:], key, value, start[:3], length[1:], table[[1, 0], :2])
    one_span = small(narrow, case.scales)
    assert torch.equal(one_span[0], found[1])
    assert torch.equal(one_span[1], torch.zeros_like(found[2]))


def test_no_queries() -> None:
    case = Case(torch.float32, (2, 1), 64, ragged=((1, 3),))
    q, key, value, start, length, table = case.arguments()
    found = small((q[:0], key, value, start * 0, length, table), case.scales)
    assert found.shape == (0, 128)


def test_many_heads_of_one_key() -> None:
    """More heads share a KV head than a tile has rows."""
    case = Case(torch.float32, (20, 1), 16, ragged=((1, 40), (3, 17)))
    wanted = expected(case.arguments(), case.scales)
    found = small(case.arguments(), case.scales)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_refused() -> None:
    case = Case(torch.float32, (2, 1), 64, ragged=((1, 3),))
    q, key, value, *rest = case.arguments()
    run = launchers()["paged_attention"]
    with pytest.raises(KernelError, match="kivi"):
        run(q, key.to(torch.uint8), value.to(torch.uint8), *rest, 1.0)
    with pytest.raises(KernelError, match="above 0"):
        run(q, key, value, *rest, 0.0)
    with pytest.raises(KernelError, match="multiple of 8"):
        run(q[..., :12], key[..., :12], value[..., :12], *rest, 1.0)
    with pytest.raises(KernelError, match="laid out alike"):
        run(q, key, value[1:], *rest, 1.0)
    odd = torch.zeros(*key.shape[:3], 65, device=DEVICE)[..., :64]
    with pytest.raises(KernelError, match="multiples of 8"):
        run(q, odd, odd, *rest, 1.0)
    with pytest.raises(KernelError, match="scales"):
        run(q, key.to(torch.int8), value.to(torch.int8), *rest, 1.0)

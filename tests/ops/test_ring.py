"""Ranks that are threads here: what rows are is what one process makes them, by `==`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.ops.attention import gather_keys
from penstock.ops.ranks import HEADER
from penstock.parallel import Ring
from penstock.step import ForkedStep, RingStep, Step

HEADS, KV_HEADS, DIM = 4, 2, 32
ISAS = ["avx2", "avx512", "avx512-bf16", "amx", "amx-emulated"]
STORED = {"same": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
needs_native = pytest.mark.skipif(native.handle is None, reason="no native kernels")


def meeting_of(place_bytes: int) -> Tensor:
    """Where ranks meet; its places are full of what others have left, here 8e37."""
    meeting = torch.full((HEADER + 2 * place_bytes,), 0x7E, dtype=torch.uint8)
    meeting[:HEADER] = 0
    return meeting


def meetings(meeting: Tensor, ranks: int) -> int:
    """How many there were, of which each rank has been at all."""
    counts = meeting[:HEADER].view(torch.int32).view(-1, 16)[1 : 1 + ranks, 0]
    assert (counts == counts[0]).all()
    return int(counts[0])


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Case:
    """Sequences of some length, of which the last tokens come now: (context, new)."""

    sequences: list[tuple[int, int]]
    ranks: int
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    kept: int = 0  # dimensions of keys and values, in bases of their own
    value_size: float = 1.0

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.size = 256 * self.ranks
        values = self.kept or DIM
        self.width = (HEADS + KV_HEADS) * DIM + KV_HEADS * values
        self.bases = torch.randn(2, KV_HEADS, DIM, self.kept) / 6 if self.kept else None
        needs = [-(-context // self.size) for context, _ in self.sequences]
        order = torch.randperm(sum(needs) + 1).to(torch.int32)  # blocks anywhere
        self.table = torch.zeros(len(needs), max(needs), dtype=torch.int32)
        taken = 0
        for row, need in zip(self.table, needs, strict=True):
            row[:need] = order[taken : taken + need]
            taken += need
        self.blocks = sum(needs) + 1
        sizes = torch.ones(self.width)
        sizes[-KV_HEADS * values :] = self.value_size
        self.qkv = [(torch.randn(c, self.width) * sizes).to(self.dtype) for c, _ in self.sequences]
        angles = torch.rand(max(c for c, _ in self.sequences), DIM // 2) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.norm = torch.rand(DIM) + 0.5

    def cache(self, size: int) -> tuple[Tensor, ...]:
        heads = ((KV_HEADS, self.kept or DIM),)
        layout = PagedLayout(heads, self.stored or self.dtype, size)
        return layout.allocate(self.blocks * self.ranks * 256 // size)[0]

    def step(self, before: bool) -> tuple[Step, Tensor]:
        """What came before, or what comes now, and its rows of queries, keys and values."""
        spans = [(0, c - n) if before else (c - n, c) for c, n in self.sequences]
        positions = torch.cat([torch.arange(a, b) for a, b in spans]).int()
        of = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
        slots = self.table[of, positions.long() // self.size] * self.size + positions % self.size
        start = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int()
        step = Step(
            positions, positions, slots, start, ints(*(b for _, b in spans)), self.table, ints()
        )
        return step, torch.cat([x[a:b] for x, (a, b) in zip(self.qkv, spans, strict=True)])

    def write(self, step: Step, qkv: Tensor, cache: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        given = qkv, HEADS, self.norm, self.norm, 1e-6, self.cos_sin, False
        positions = step.all_positions if isinstance(step, RingStep) else step.positions
        return ops.rotary_cache(*given, positions, slots, *cache, bases=self.bases)

    @property
    def learned(self) -> Tensor | None:
        return torch.arange(HEADS).float() if self.sinks else None

    def alone(self) -> Tensor:
        """By one process."""
        cache = self.cache(32)
        table = (self.table.unsqueeze(2) * (self.size // 32) + torch.arange(self.size // 32)).int()
        for before in (True, False):
            step, qkv = self.step(before)
            q = self.write(step, qkv, cache, step.slots)
        keys, values, *scales = cache
        named: dict[str, Any] = dict(zip(("key_scale", "value_scale"), scales, strict=False))
        return ops.paged_attention(
            q, keys, values, step.query_start, step.context_len, table.flatten(1), DIM**-0.5,
            self.window, self.softcap, self.learned, **named,
        )  # fmt: skip

    def together(
        self, call: Callable[..., Tensor], place_bytes: int = 1 << 20, worth: int = 300
    ) -> Tensor:
        """By all ranks."""
        meeting = meeting_of(place_bytes)

        def rank(number: int) -> Tensor:
            ring, cache = Ring(number, self.ranks, meeting), self.cache(256)
            step, qkv = self.step(before=True)
            self.write(ring.part(step, worth), qkv, cache, ring.part(step, worth).slots)
            step, qkv = self.step(before=False)
            own = ring.part(step, worth)
            a, b = int(own.rows[number]), int(own.rows[number + 1])
            keys, values, *scales = cache
            scales = scales or [None, None]
            return call(
                qkv[a:b], HEADS, self.norm, self.norm, 1e-6, self.cos_sin, False,
                own.all_positions, own.slots, keys, values, *scales, own.query_start,
                own.context_len, own.block_table, DIM**-0.5, self.window, self.softcap,
                self.learned, None, meeting, own.rows, number, self.ranks, self.bases,
            )  # fmt: skip

        with ThreadPoolExecutor(self.ranks) as threads:
            found = torch.cat(list(threads.map(rank, range(self.ranks))))
        self.meetings = meetings(meeting, self.ranks)
        return found


MIXED = [
    (1, 1), (700, 1), (1100, 1100), (513, 2), (1500, 40), (256, 256), (900, 300), (5, 5), (264, 16),
]  # fmt: skip
"""Single tokens, whole prompts, chunks and drafts, of contexts from one token to six spans; of the
last, half of the rows see nothing of the second span.
"""


@needs_native
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("restore")
def test_rows_are_those_of_one_process(isa: str, ranks: int) -> None:
    if isa not in native.available_isas():
        pytest.skip(f"no {isa} here")
    native.select_isa(isa)
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(MIXED, ranks, dtype)
        assert torch.equal(case.together(ops.ring_attention), case.alone())


@needs_native
@pytest.mark.parametrize("stored", [s for s in STORED if s != "same"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_every_kind_of_cache(stored: str, ranks: int) -> None:
    case = Case(MIXED, ranks, stored=STORED[stored])
    assert torch.equal(case.together(ops.ring_attention), case.alone())


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "form",
    [
        {"window": 300}, {"softcap": 20.0}, {"sinks": True}, {"window": 64, "sinks": True},
        {"kept": 16},
    ],
)  # fmt: skip
@pytest.mark.usefixtures("restore")
def test_what_layers_see(form: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(MIXED, 2, dtype, **form)
        assert torch.equal(case.together(ops.ring_attention), case.alone())


@needs_native
@pytest.mark.parametrize("worth", [0, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_many_rounds(dtype: torch.dtype, worth: int) -> None:
    """A place for little at a time: what rows have of the spans before is carried along."""
    case = Case(MIXED, 3, dtype)
    for place_bytes in (1 << 18, 140_032):
        found = case.together(ops.ring_attention, place_bytes, worth)
        assert torch.equal(found, case.alone())


@needs_native
@pytest.mark.parametrize(
    ("stored", "new", "expected"),
    [
        ("same", 1, 1 + 1), ("same", 120, 1 + 8), ("same", 121, 1 + 6),
        ("int8", 64, 1 + 4), ("int8", 65, 1 + 3),
    ],
)  # fmt: skip
def test_the_fewer_bytes_are_given(stored: str, new: int, expected: int) -> None:
    """A row gets 544 bytes of a span, which is 64 KiB, or 34 in int8. A place of 140,032 has room
    for two of 11 spans, or four, or for two times what 32 rows have of all. Rows meet before.
    """
    case = Case([(2700, new)], 2, stored=STORED[stored])
    assert torch.equal(case.together(ops.ring_attention, 140_032, 10**6), case.alone())
    assert case.meetings == expected


@needs_native
@pytest.mark.parametrize("new", [1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_too_small_for_their_type_are_zeros(dtype: torch.dtype, new: int) -> None:
    """Rows that ask and rows that spans pass by."""
    case = Case([(700, new)], 2, dtype, value_size=3e-37)
    alone = case.alone()
    assert 0.01 < (alone == 0).double().mean() < 0.99
    assert torch.equal(case.together(ops.ring_attention), alone)


@needs_native
def test_fewer_rows_than_ranks() -> None:
    for sequences in ([(600, 1)], [(1, 1)], [(300, 2)], [(2000, 1), (40, 1)]):
        case = Case(sequences, 4)
        assert torch.equal(case.together(ops.ring_attention), case.alone())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference(dtype: torch.dtype, stored: str) -> None:
    """It says what the native one says, and what one process says."""
    if stored != "same" and dtype is torch.float32:
        pytest.skip("of bfloat16 alone")
    sequences = [(1, 1), (600, 1), (300, 300), (530, 20)]
    case = Case(sequences, 2, dtype, stored=STORED[stored], window=400)
    found = case.together(ops.op("ring_attention").reference)
    close = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, case.alone(), rtol=close, atol=close)


@pytest.mark.parametrize("which", ["reference", *["native"] * (native.handle is not None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_rows_come_to_the_first_rank(which: str, dtype: torch.dtype) -> None:
    """In any order, some twice, and more than have room at once."""
    rows, x, meeting = ints(0, 4, 4, 11), torch.randn(11, 24).to(dtype), meeting_of(256)
    wanted = ints(10, 0, 3, 4, 4, 9, 1)
    gather = ops.implementations("gather_rows")[which]

    def rank(number: int) -> Tensor:
        own: Tensor = x[int(rows[number]) : int(rows[number + 1])]
        found: Tensor = gather(own, wanted, meeting, rows, number, 3)
        return found

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(rank, range(3))
    assert torch.equal(first, x[wanted.long()])
    assert all(other.shape == (7, 0) for other in others)


@pytest.mark.parametrize("worth", [0, 2000])
def test_shares_of_a_step(worth: int) -> None:
    """Rows are dealt by what they cost, slots by who keeps them."""
    case = Case([(1000, 600), (700, 1)], 2)
    step, _ = case.step(before=False)
    parts = [Ring(rank, 2, meeting_of(64)).part(step, worth) for rank in range(2)]
    assert torch.equal(parts[0].rows, parts[1].rows)
    assert torch.equal(torch.cat([part.tokens for part in parts]), step.tokens)
    costs = [float((part.positions + 1 + worth).sum()) for part in parts]
    assert abs(costs[0] - costs[1]) < 2 * (1000 + worth)
    own = torch.stack([part.slots for part in parts])
    assert ((own >= 0).sum(0) == 1).all()
    rank, offset = own.argmax(0), own.max(0).values
    assert torch.equal(offset // 256 * 512 + rank * 256 + offset % 256, step.slots)


@pytest.mark.parametrize(("worth", "second"), [(0, 6), (28, 5)])
def test_rows_cost_products_too(worth: int, second: int) -> None:
    """Of 8 rows, row i costs i + 1 + worth: half of 36 is within row 5, of 260 within row 4."""
    step, _ = Case([(8, 8)], 1).step(before=False)
    assert Ring(0, 2, meeting_of(64)).part(step, worth).rows.tolist() == [0, second, 8]


@pytest.mark.parametrize("which", ["reference", *["native"] * (native.handle is not None)])
def test_copies_are_of_who_keeps_them(which: str) -> None:
    """A token of one way through a tree of drafts is written to the blocks of another, too."""
    case, meeting = Case([(300, 300)], 2), meeting_of(1 << 20)
    call = ops.implementations("ring_attention")[which]
    step, qkv = case.step(before=False)
    spare = 512 * int(next(b for b in range(case.blocks) if b not in case.table))
    copies = torch.tensor([[t, spare + t] for t in (3, 260, 299)], dtype=torch.int32)
    forked = ForkedStep(*(getattr(step, f.name) for f in fields(step)), copies)

    def rank(number: int) -> list[bool]:
        own, cache = Ring(number, 2, meeting).part(forked, 0), case.cache(256)
        assert own.copies is not None
        call(
            qkv[int(own.rows[number]) : int(own.rows[number + 1])], HEADS, case.norm, case.norm,
            1e-6, case.cos_sin, False, own.all_positions, own.slots, *cache, None, None,
            own.query_start, own.context_len, own.block_table, 0.2, 0, 0.0, None, own.copies,
            meeting, own.rows, number, 2,
        )  # fmt: skip
        keys = gather_keys(cache[0], torch.arange(case.blocks), case.blocks * 256, DIM)
        return [torch.equal(keys[own.slots[t]], keys[at]) for t, at in own.copies.tolist()]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[True], [True, True]]


@needs_native
def test_as_long_as_a_ring_says() -> None:
    """Where a model is loaded and where a row is computed, the same is refused."""
    place_bytes = 140_032
    most = Ring(0, 1, meeting_of(place_bytes)).most_tokens(DIM)
    assert most == 32 * 256
    case = Case([(most, 1)], 1)
    assert torch.equal(case.together(ops.ring_attention, place_bytes), case.alone())
    with pytest.raises(RuntimeError, match="a context of 8193 tokens has no room"):
        Case([(most + 1, 1)], 1).together(ops.ring_attention, place_bytes)


@needs_native
def test_what_cannot_be() -> None:
    case = Case([(300, 300)], 1)
    with pytest.raises(RuntimeError, match="a context of 300 tokens has no room"):
        case.together(ops.ring_attention, place_bytes=4096)
    with pytest.raises(RuntimeError, match="rank 0 has 3 rows, and was given 2"):
        ops.gather_rows(torch.zeros(2, 8), ints(0), meeting_of(256), ints(0, 3), 0, 1)

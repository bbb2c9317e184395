"""Latents that ranks share: what rows see of them is what they see in one process, by `==`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLatents
from penstock.kernels import native
from penstock.parallel import Ring
from penstock.step import RingStep, Step
from tests.ops.test_ring import ISAS, ints, meeting_of, meetings, needs_native

HEADS, RANK, TURNING = 4, 40, 8
SEQUENCES = [(1, 1), (700, 1), (900, 900), (1300, 40), (256, 256), (513, 2)]
"""(context, new tokens)"""


class Case:
    """Rows of sequences whose last tokens come now, after all others."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype,
        window: int = 0,
        sequences: Sequence[tuple[int, int]] = SEQUENCES,
    ) -> None:
        torch.manual_seed(5)
        self.sequences = sequences
        self.ranks, self.dtype, self.window, self.size = ranks, dtype, window, 256 * ranks
        needs = [-(-context // self.size) for context, _ in self.sequences]
        self.blocks = sum(needs)
        order = torch.randperm(self.blocks).to(torch.int32)
        self.table = torch.zeros(len(needs), max(needs), dtype=torch.int32)
        for row, part in zip(self.table, order.split(needs), strict=True):
            row[: len(part)] = part
        self.kv = [torch.randn(c, RANK + TURNING).to(dtype) for c, _ in self.sequences]
        angles = torch.rand(max(c for c, _ in self.sequences), TURNING // 2) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.norm = torch.rand(RANK) + 0.5
        tokens = sum(new for _, new in self.sequences)
        self.q = torch.randn(tokens, HEADS, RANK + TURNING).to(dtype)

    def cache(self, size: int) -> Tensor:
        layout = PagedLatents(((1, RANK + TURNING),), self.dtype, size)
        return layout.allocate(self.blocks * self.size // size)[0][0]

    def step(self, before: bool) -> tuple[Step, Tensor]:
        spans = [(0, c - n) if before else (c - n, c) for c, n in self.sequences]
        at = torch.cat([torch.arange(a, b) for a, b in spans]).int()
        of = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
        slots = self.table[of, at.long() // self.size] * self.size + at % self.size
        start = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int()
        step = Step(at, at, slots, start, ints(*(b for _, b in spans)), self.table, ints())
        return step, torch.cat([x[a:b] for x, (a, b) in zip(self.kv, spans, strict=True)])

    def write(self, step: Step, kv: Tensor, cache: Tensor) -> None:
        at = step.all_positions if isinstance(step, RingStep) else step.positions
        ops.mla_cache(kv, self.norm, 1e-6, self.cos_sin, False, at, step.slots, cache)

    def alone(self) -> Tensor:
        cache, parts = self.cache(32), self.size // 32
        for before in (True, False):
            step, kv = self.step(before)
            self.write(step, kv, cache)
        table = (self.table.unsqueeze(2) * parts + torch.arange(parts)).int().flatten(1)
        return ops.mla_attention(
            self.q, cache, step.query_start, step.context_len, table, 0.2, RANK, self.window
        )

    def together(self, which: str, place_bytes: int = 1 << 20) -> Tensor:
        meeting = meeting_of(place_bytes)
        write: Callable[..., None] = ops.implementations("ring_mla_cache")[which]
        see: Callable[..., Tensor] = ops.implementations("ring_mla_attention")[which]

        def rank(number: int) -> Tensor:
            ring, cache = Ring(number, self.ranks, meeting), self.cache(256)
            step, kv = self.step(before=True)
            self.write(ring.part(step, 100), kv, cache)
            step, kv = self.step(before=False)
            own = ring.part(step, 100)
            rows = slice(int(own.rows[number]), int(own.rows[number + 1]))
            shared = meeting, own.rows, number, self.ranks
            write(
                kv[rows], self.norm, 1e-6, self.cos_sin, False, own.all_positions, own.slots,
                cache, None, *shared,
            )  # fmt: skip
            return see(
                self.q[rows].contiguous(), cache, own.query_start, own.context_len,
                own.block_table, 0.2, RANK, self.window, *shared,
            )  # fmt: skip

        with ThreadPoolExecutor(self.ranks) as threads:
            found = torch.cat(list(threads.map(rank, range(self.ranks))))
        self.meetings = meetings(meeting, self.ranks)
        return found


@needs_native
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("restore")
def test_rows_are_those_of_one_process(isa: str, ranks: int) -> None:
    if isa not in native.available_isas():
        pytest.skip(f"no {isa} here")
    native.select_isa(isa)
    for dtype in (torch.float32, torch.bfloat16):
        for window, place_bytes in ((0, 1 << 20), (300, 1 << 20), (0, 110_000)):
            case = Case(ranks, dtype, window)
            assert torch.equal(case.together("native", place_bytes), case.alone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference(dtype: torch.dtype) -> None:
    case = Case(2, dtype, window=400)
    close = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(case.together("reference"), case.alone(), rtol=close, atol=close)


@needs_native
def test_of_any_length() -> None:
    """Latents pass by, of few rows too: four of 20 spans have room at once, all parts have none."""
    case = Case(2, torch.bfloat16, sequences=[(5000, 3)])
    assert torch.equal(case.together("native", 110_000), case.alone())
    assert case.meetings == 1 + 5

"""The masks of a step's constrained rows, computed in another thread while its forward pass runs.

What a mask depends on is known before the step: the tokens so far. So `begin` is called before the
forward pass and `masked` after it. One thread goes through the rows; where that takes less than the
forward pass, constraints cost no time but that of writing -inf.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import RequestError
from penstock.sampling.constraint import Bits, Constraint, num_words
from penstock.sampling.state import SequenceSampling
from penstock.sampling.transfer import upload

_BROKEN: Final = "What limits this output broke: "


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """What the masks of one step took."""

    fill_s: tuple[float, ...]  # each mask, in the other thread
    wait_s: float  # until the last was there, after the forward pass
    apply_s: float  # to make logits -inf


class Masks:
    """Memory for masks, and the thread that writes them.

    `watch` is shown each step's times.
    """

    def __init__(self, vocab_size: int) -> None:
        self.watch: Callable[[MaskTimes], None] | None = None
        self._words = num_words(vocab_size)
        self._bits: Bits = np.zeros((0, self._words), dtype=np.int32)
        self._rows: list[SequenceSampling] = []
        self._members: list[int] = []
        self._work: Future[dict[int, str]] | None = None
        self._fill_s: list[float] = []
        self._pool: ThreadPoolExecutor | None = None  # made when it is first needed

    def begin(self, rows: Sequence[SequenceSampling]) -> None:
        """Start with the masks of those of `rows` that have a constraint."""
        self.wait()
        members = [i for i, row in enumerate(rows) if row.constraint is not None]
        self._rows, self._members = list(rows), members
        if not members:
            return
        if len(self._bits) < len(members):
            self._bits = np.zeros((2 * len(members), self._words), dtype=np.int32)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="penstock-masks")
        constraints = [rows[i].constraint for i in members]
        self._fill_s = []
        self._work = self._pool.submit(_fill, constraints, members, self._bits, self._fill_s)

    def wait(self) -> dict[int, str]:
        """Let the work end; by row, what went wrong."""
        work, self._work = self._work, None
        return {} if work is None else work.result()

    def apply_(self, logits: Tensor, rows: Sequence[SequenceSampling]) -> dict[int, str]:
        """Make impossible in logits [S, V] what constraints forbid; by row, what went wrong."""
        if self._rows != list(rows):  # nobody has begun with these
            self.begin(rows)
        start = time.perf_counter()
        errors = self.wait()
        waited = time.perf_counter()
        self._rows = []  # they will have moved on
        if self._members:
            bits = upload(torch.from_numpy(self._bits[: len(self._members)]), logits.device)
            ops.mask_(logits, upload(torch.tensor(self._members), logits.device), bits)
            if self.watch is not None:
                applied = time.perf_counter()
                self.watch(MaskTimes(tuple(self._fill_s), waited - start, applied - waited))
        return errors


def _fill(
    constraints: Sequence[Constraint | None],
    members: Sequence[int],
    bits: Bits,
    seconds: list[float],
) -> dict[int, str]:
    errors: dict[int, str] = {}
    start = time.perf_counter()
    for row, (member, constraint) in enumerate(zip(members, constraints, strict=True)):
        assert constraint is not None  # of rows that have one
        try:
            constraint.fill(bits[row])
        except RequestError as error:
            errors[member] = str(error)
        except Exception as error:  # its request's own failure: the others go on
            errors[member] = f"{_BROKEN}{error!r}"
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return errors

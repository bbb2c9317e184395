"""What every step of an engine cost, what it had to cost, and where the rest of the time went.

One `record` a step, whose work doesn't grow with the layers: sums for `/metrics` and reports, kept
apart for steps with prompts and steps that only decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from penstock.hardware import AnyPeaks
from penstock.roofline.cost import CostModel
from penstock.roofline.counts import Cost, StepSize
from penstock.roofline.floor import Bound, Floor, floor_of

CAUSES = ("draft", "schedule", "batch", "sample", "detokenize", "output", "wait")
"""Where time goes outside of the forward pass. `draft` guesses tokens; `output` appends,
checks for the end and hands out; `wait` lies between two steps while there are requests."""

_seconds = attrgetter(*(f"{cause}_s" for cause in CAUSES))


@dataclass(slots=True)
class StepRecord:
    """One step. `seconds` is all of it but the wait before it."""

    start: float  # time.perf_counter()
    seconds: float
    draft_s: float
    schedule_s: float
    batch_s: float
    forward_s: float
    sample_s: float
    detokenize_s: float
    output_s: float
    wait_s: float
    size: StepSize
    cost: Cost
    floor: Floor | None  # None while this machine's peaks aren't known
    generated: int = 0  # tokens that sequences were given

    @property
    def overhead_s(self) -> float:
        """Outside the forward pass."""
        return self.seconds - self.forward_s

    @property
    def lost(self) -> dict[str, float]:
        """Seconds outside the forward pass by cause."""
        return dict(zip(CAUSES, _seconds(self), strict=True))


@dataclass(slots=True)
class Totals:
    """Steps added up, beside their floor."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0  # computed, guesses that were wrong too
    prefill_tokens: int = 0  # of these: of prompts, or computed again
    generated: int = 0  # that sequences were given
    seconds: float = 0.0
    draft_s: float = 0.0
    schedule_s: float = 0.0
    batch_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    output_s: float = 0.0
    wait_s: float = 0.0
    bytes_moved: int = 0
    flops: int = 0
    known_s: float = 0.0  # of `seconds`: the steps whose floor is known
    floors_s: float = 0.0
    memory_s: float = 0.0  # to move the bytes at the measured bandwidth
    compute_s: float = 0.0  # to compute at the measured peaks

    def add(self, record: StepRecord, floor: Floor | None) -> None:
        """Count a step; `floor` may be taken with other peaks than the record's own."""
        self.steps += 1
        self.sequences += len(record.size.queries)
        self.tokens += record.size.tokens
        self.prefill_tokens += record.size.prefill_tokens
        self.generated += record.generated
        self.seconds += record.seconds
        self.draft_s += record.draft_s
        self.schedule_s += record.schedule_s
        self.batch_s += record.batch_s
        self.forward_s += record.forward_s
        self.sample_s += record.sample_s
        self.detokenize_s += record.detokenize_s
        self.output_s += record.output_s
        self.wait_s += record.wait_s
        self.bytes_moved += record.cost.bytes_moved
        self.flops += record.cost.flops
        if floor is not None:
            self.known_s += record.seconds
            self.floors_s += floor.seconds
            self.memory_s += floor.memory_s
            self.compute_s += floor.compute_s

    def plus(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def since(self, before: Totals) -> Totals:
        """What was added after `before` was copied."""
        return Totals(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def tokens_per_s(self) -> float:
        """Of prompts computed and of outputs generated: wrong guesses aren't speed."""
        done = self.prefill_tokens + self.generated
        return done / self.seconds if self.seconds else 0.0

    @property
    def floor_s(self) -> float | None:
        """The least time of the steps whose floor is known; None where none is."""
        return self.floors_s if self.known_s else None

    @property
    def share(self) -> float | None:
        """Floor ÷ time; above 1 only where the weights stay in a cache."""
        return self.floors_s / self.known_s if self.known_s else None

    @property
    def bound(self) -> Bound | None:
        """What the floor is made of."""
        if not self.known_s:
            return None
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def lost(self) -> dict[str, float]:
        """Seconds outside the forward pass by cause."""
        return dict(zip(CAUSES, _seconds(self), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": self.steps,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "prefill_tokens": self.prefill_tokens,
            "generated_tokens": self.generated,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "bytes_moved": self.bytes_moved,
            "flops": self.flops,
            "floor_s": self.floor_s,
            "share_of_floor": self.share,
            "bound": self.bound,
            "forward_s": self.forward_s,
            "lost_s": self.lost,
        }


class Ledger:
    """An engine's book: `record` after every step, `snapshot` whenever somebody asks."""

    def __init__(self, costs: CostModel, peaks: AnyPeaks | None) -> None:
        """peaks: None where this machine wasn't measured; may be set later."""
        self.costs = costs
        self.peaks = peaks
        self.prefill = Totals()  # steps in which any prompt was computed, or computed again
        self.decode = Totals()  # the others
        self.watch: Callable[[StepRecord], None] | None = None  # is shown every record
        self._waiting_since: float | None = None

    def wait(self, now: float) -> None:
        """There are requests and no step runs, from `now` on (or earlier, where told before)."""
        if self._waiting_since is None:
            self._waiting_since = now

    def record(
        self,
        size: StepSize,
        marks: Sequence[float],
        detokenize_s: float = 0.0,
        draft_s: float = 0.0,
        generated: int = 0,
    ) -> StepRecord:
        """Count a step; `marks`: its start and the ends of its five parts, the first of which
        includes `draft_s` and the last `detokenize_s`. generated: tokens that sequences were given.
        """
        start, scheduled, built, computed, sampled, end = marks
        since = start if self._waiting_since is None else self._waiting_since
        cost, peaks = self.costs.cost(size), self.peaks
        record = StepRecord(
            start=start,
            seconds=end - start,
            draft_s=draft_s,
            schedule_s=scheduled - start - draft_s,
            batch_s=built - scheduled,
            forward_s=computed - built,
            sample_s=sampled - computed,
            detokenize_s=detokenize_s,
            output_s=end - sampled - detokenize_s,
            wait_s=start - since,
            size=size,
            cost=cost,
            floor=None if peaks is None else floor_of(cost, peaks),
            generated=generated,
        )
        (self.prefill if size.is_prefill else self.decode).add(record, record.floor)
        if self.watch is not None:
            self.watch(record)
        return record

    def rest(self) -> None:
        """A step has ended: what comes until the next is no wait unless `wait` says so."""
        self._waiting_since = None

    @property
    def total(self) -> Totals:
        """Both phases together."""
        return self.prefill.plus(self.decode)

    def snapshot(self) -> dict[str, Any]:
        """Everything so far, for JSON and metrics; floors are None while no peaks are known."""
        return {
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "peaks": None if self.peaks is None else asdict(self.peaks),
        }

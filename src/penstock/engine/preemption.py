"""How a sequence gives way: by forgetting what it has computed, or by copying it elsewhere.

Whichever is predicted to cost less. The work ahead is known (a prefill's floor, or its tokens where
this machine's peaks aren't known; the bytes of blocks), and the speed is learnt from what was
measured, so the prediction is one division. What a preemption did cost is kept beside it.
Source: Kwon et al. 2023, arXiv:2309.06180, sections 4.5 and 7.3, which compares both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from penstock.config import SchedulerConfig
from penstock.engine.outputs import PreemptionRecord
from penstock.engine.plan import Swap
from penstock.engine.request import Sequence
from penstock.roofline import Ledger, StepRecord, StepSize
from penstock.roofline.floor import floor_of

ASSUMED_BYTES_PER_S = 8e9
"""The speed of copies until one was measured: rather high, so that one is made."""

WEIGHT = 0.2
"""Of the newest measurement in a moving average."""

LOG_LENGTH = 4096
"""So many of the last preemptions are remembered one by one."""


class LearntSpeed:
    """Work per second: an exponential moving average for each power of two of the work's size.

    Apart by size, because what is small has overheads that what is large hasn't. It is the speed
    that is averaged, not the time: a measurement that was interrupted for long counts as slow once,
    however long that was.
    """

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}

    def observe(self, size: int, work: float, seconds: float) -> None:
        """`work`, of that size, took so long."""
        if work <= 0 or seconds <= 0:
            return
        key, speed = size.bit_length(), work / seconds
        before = self._speeds.get(key, speed)
        self._speeds[key] = before + WEIGHT * (speed - before)

    def seconds(self, size: int, work: float) -> float | None:
        """How long `work` will take, by the nearest size that was seen; None before any was."""
        if not self._speeds:
            return None
        wanted = size.bit_length()
        key = min(self._speeds, key=lambda known: abs(known - wanted))
        return work / self._speeds[key]


def blocks_grown(others: Seq[Sequence], steps: int, block_size: int) -> int:
    """How many blocks `others` take until one of them ends, `steps` tokens on by its limits.

    Who ends before can't be known. They take first what is free or was let go before. (The last
    token is given and not computed.)
    """
    return sum(
        max(-(-(len(s.tokens) + steps - 1) // block_size) - len(s.blocks), 0) for s in others
    )


class CostPredictor:
    """What a preemption will cost, either way."""

    def __init__(self, ledger: Ledger, bytes_per_block: int, max_num_batched_tokens: int) -> None:
        self._ledger = ledger
        self._bytes_per_block = bytes_per_block
        self._chunk = max_num_batched_tokens
        self._share = LearntSpeed()  # of the floor: its seconds per second
        self._tokens = LearntSpeed()  # where there is no floor
        self._out, self._back = LearntSpeed(), LearntSpeed()  # bytes

    def recompute_s(self, start: int, end: int) -> float | None:
        """To compute the keys and values of tokens start … end again; those before are there."""
        size = min(end - start, self._chunk)
        floor = self._floor_s(start, end)
        seconds = None if floor is None else self._share.seconds(size, floor)
        return self._tokens.seconds(size, end - start) if seconds is None else seconds

    def _floor_s(self, start: int, end: int) -> float | None:
        """The least time of a prefill from token `start` on, in chunks."""
        costs, peaks = self._ledger.costs, self._ledger.peaks
        if peaks is None:
            return None
        floor = 0.0
        for at in range(start, end, self._chunk):
            last = min(at + self._chunk, end)
            size = StepSize([last - at], [last], 0, experts=costs.expected_experts(last - at))
            floor += floor_of(costs.cost(size), peaks).seconds
        return floor

    def swap_s(self, out: int, back: int) -> float:
        """To copy so many blocks out, and so many back."""
        return self._copy_s(self._out, out) + self._copy_s(self._back, back)

    def _copy_s(self, speed: LearntSpeed, blocks: int) -> float:
        work = blocks * self._bytes_per_block
        seconds = speed.seconds(blocks, work)
        return work / ASSUMED_BYTES_PER_S if seconds is None else seconds

    def saw_step(self, step: StepRecord) -> None:
        """Learn from a step with prompts."""
        tokens = step.size.tokens
        self._tokens.observe(tokens, tokens, step.forward_s)
        if step.floor is not None:
            self._share.observe(tokens, step.floor.seconds, step.forward_s)

    def saw_copy(self, blocks: int, seconds: float, *, back: bool) -> None:
        """Learn from blocks that were copied out, or back."""
        speed = self._back if back else self._out
        speed.observe(blocks, blocks * self._bytes_per_block, seconds)


class Preemption:
    """Chooses how victims give way, and keeps what each choice cost."""

    def __init__(self, config: SchedulerConfig, predictor: CostPredictor) -> None:
        self.mode = config.preemption_mode
        self.predictor = predictor
        self.num_recompute = 0
        self.num_swap = 0
        self.log: deque[PreemptionRecord] = deque(maxlen=LOG_LENGTH)  # those that are over

    def stats(self) -> dict[str, int]:
        """How often, and which way."""
        return {
            "preemptions": self.num_recompute + self.num_swap,
            "preemptions_recompute": self.num_recompute,
            "preemptions_swap": self.num_swap,
        }

    def prefers_swap(self, recompute: PreemptionRecord, swap: PreemptionRecord) -> bool:
        """Which of two ways that are both open."""
        if self.mode != "auto":
            return self.mode == "swap"
        if recompute.predicted_s is None or swap.predicted_s is None:
            return False
        return swap.predicted_s < recompute.predicted_s

    def recompute(self, victim: Sequence, held: int, found: int) -> PreemptionRecord:
        """A record of forgetting what `victim` has in `held` blocks; `found` tokens stay."""
        return PreemptionRecord(
            victim.request.request_id,
            "recompute",
            victim.num_computed,
            held,
            self.predictor.recompute_s(found, victim.num_computed),
        )

    def swap(self, group: Seq[Sequence], out: int, back: int) -> PreemptionRecord:
        """A record of copying blocks out, of which so many won't be in the cache any more."""
        return PreemptionRecord(
            group[0].request.request_id,
            "swap",
            sum(s.num_computed for s in group),
            out,
            self.predictor.swap_s(out, back),
        )

    def gave_way(self, victim: Sequence, record: PreemptionRecord) -> None:
        """`victim` has given way, as in `record`."""
        victim.preempted = record
        victim.owner.metrics.preemptions += 1
        if record.mode == "swap":
            self.num_swap += 1
        else:
            self.num_recompute += 1

    def starts_again(self, sequence: Sequence, found: int) -> None:
        """`sequence` computes again what it has given up, but for `found` tokens."""
        record = sequence.preempted
        if record is None:
            return
        record.redo_tokens = max(record.tokens - found, 0)
        if not record.redo_tokens:
            self._close(sequence, record)

    def copied(self, swap: Swap, seconds: float, *, back: bool) -> None:
        """A group's blocks were copied out; or those back that weren't in the cache any more."""
        record, blocks = swap.record, len(swap.pairs)
        record.measured_s += seconds
        self.predictor.saw_copy(blocks, seconds, back=back)
        if back:
            self.log.append(record)

    def not_copied(self) -> None:
        """A group that gave way by copying couldn't be copied: it will compute again instead."""
        self.num_swap -= 1
        self.num_recompute += 1

    def saw_step(self, step: StepRecord, parts: Seq[tuple[Sequence, int]]) -> None:
        """Learn from a step, and count what of it was computed for the second time."""
        if step.size.is_prefill:
            self.predictor.saw_step(step)
        for sequence, count in parts:
            record = sequence.preempted
            if record is None or not record.redo_tokens:
                continue
            again = min(count, record.redo_tokens)
            record.redo_tokens -= again
            record.measured_s += step.forward_s * again / step.size.tokens
            if not record.redo_tokens:
                self._close(sequence, record)

    def _close(self, sequence: Sequence, record: PreemptionRecord) -> None:
        sequence.preempted = None
        self.log.append(record)

"""An engine whose steps are timed and held against the least time this machine allows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput, StepTimes
from penstock.hardware import Peaks
from penstock.roofline import Cost, floor_s, step_cost
from penstock.runtime import Runner, Runtime
from penstock.step import Step


@dataclass(slots=True)
class _Ran:
    """What the forward passes of one step were given; their tensors are overwritten later."""

    queries: list[int] = field(default_factory=list)  # new tokens of each sequence
    contexts: list[int] = field(default_factory=list)  # tokens each sees
    sampled: int = 0  # rows of logits


class _WatchedRunner(Runner):
    """Remembers what it ran."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.kv = runner.kv
        self.ran = _Ran()

    def forward(self, step: Step) -> Tensor:
        self.ran.queries += [b - a for a, b in pairwise(step.query_start.tolist())]
        self.ran.contexts += step.context_len.tolist()
        self.ran.sampled += step.sample_at.shape[0]
        return self._runner.forward(step)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what was in it and how long it took."""

    seconds: float  # the engine's step, all of it
    times: StepTimes  # its parts
    queries: list[int]  # new tokens of each sequence
    contexts: list[int]  # tokens each sees, the new ones included
    sampled: int  # rows of logits

    @property
    def is_prefill(self) -> bool:
        """Whether any sequence had more than its last token computed."""
        return any(q > 1 or c == 1 for q, c in zip(self.queries, self.contexts, strict=True))

    @property
    def overhead_s(self) -> float:
        """Outside the forward pass."""
        return self.seconds - self.times.forward_s


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps added up, beside their floor."""

    steps: int
    tokens: int  # computed
    seconds: float
    bytes_moved: int
    flops: int
    floor_s: float
    memory_s: float  # to move the bytes at the measured bandwidth
    compute_s: float  # to compute at the measured peak

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Floor ÷ time: 1 is all that this machine has."""
        return self.floor_s / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> str:
        """What the floor is made of."""
        return "memory" if self.memory_s >= self.compute_s else "compute"

    def as_dict(self) -> dict[str, float | int | str]:
        """For JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "bytes_moved": self.bytes_moved,
            "flops": self.flops,
            "floor_s": self.floor_s,
            "share_of_floor": self.share,
            "bound": self.bound,
        }


class Meter:
    """Drives an engine of its own on `runtime`, recording every step."""

    def __init__(self, config: EngineConfig, runtime: Runtime) -> None:
        self._runner = _WatchedRunner(runtime.runner)
        self.runtime = runtime
        self.engine = Engine(config, replace(runtime, runner=self._runner))
        self.records: list[StepRecord] = []

    @property
    def weight_format(self) -> str:
        """How the weights are stored."""
        return self.runtime.model.model.head.weight_format.name

    def step(self) -> list[RequestOutput]:
        """One step of the engine; recorded unless there was nothing to compute."""
        before = replace(self.engine.times)
        start = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - start
        ran, self._runner.ran = self._runner.ran, _Ran()
        if ran.queries:
            times = self.engine.times.since(before)
            record = StepRecord(seconds, times, ran.queries, ran.contexts, ran.sampled)
            self.records.append(record)
        return outputs

    def take(self) -> list[StepRecord]:
        """The records so far, which are forgotten."""
        records, self.records = self.records, []
        return records

    def cost(self, record: StepRecord) -> Cost:
        """What the step had to move and compute."""
        return step_cost(
            self.runtime.model.spec.decoder,
            self.runtime.model.model.head.weight_format,
            self.runtime.layout.dtype.itemsize,
            record.queries,
            record.contexts,
            record.sampled,
        )

    def peaks_for(self, peaks: Peaks) -> Peaks:
        """The peaks that count for this model: AMX has no float32."""
        if self.runtime.model.dtype is torch.float32:
            return replace(peaks, tile_flops=0.0)
        return peaks

    def phase(self, records: Iterable[StepRecord], peaks: Peaks) -> Phase:
        """`records` added up."""
        chosen, peaks = list(records), self.peaks_for(peaks)
        costs = [self.cost(record) for record in chosen]
        bytes_moved = sum(cost.bytes_moved for cost in costs)
        flops = sum(cost.flops for cost in costs)
        return Phase(
            steps=len(chosen),
            tokens=sum(sum(record.queries) for record in chosen),
            seconds=sum(record.seconds for record in chosen),
            bytes_moved=bytes_moved,
            flops=flops,
            floor_s=sum(floor_s(cost, peaks) for cost in costs),
            memory_s=bytes_moved / peaks.read_bytes_per_s,
            compute_s=flops / peaks.matrix_flops,
        )

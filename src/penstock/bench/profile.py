"""Where a step's time goes, operator by operator, each beside its floor.

The same steps run twice: undisturbed, for the step's time, and with every operator timed, for the
operators'. What the undisturbed forward pass takes beyond the operators is Python: around one
native call, or between the operators where they are called one by one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.bench.environment import environment, median_of
from penstock.bench.latency import WARM_UP_STEPS, Workload, run_once
from penstock.bench.meter import Meter
from penstock.bench.workload import greedy, raise_errors, random_prompts, run_batch, setup
from penstock.cache import any_part
from penstock.config import EngineConfig
from penstock.errors import KernelError
from penstock.hardware import AnyPeaks, detect
from penstock.nn import Decoder
from penstock.roofline import OPS, CostModel, Floor, StepRecord, floor_of, measure_on, op_floor
from penstock.roofline.gaps import Gaps, profiled
from penstock.roofline.trace import OTHER, GpuOpTimer, OpEvent, OpTimer, Rows, Span
from penstock.runtime import Runner, Runtime
from penstock.runtime.orders import Kind
from penstock.step import Step

PARTS = ("schedule", "batch", "sample", "detokenize", "output")
"""Of a step, outside of the forward pass."""


class _TimedRunner(Runner):
    """Times the operators of each forward pass while `on`."""

    def __init__(self, runner: Runner, decoder: Decoder) -> None:
        super().__init__(
            lambda step, _: runner.forward(step),
            runner.kv,
            runner.vocabulary,
            recent=runner.recent,
            team=runner.team,
        )
        self._runner = runner
        self._device = any_part(runner.kv).device
        if runner.graphs is not None:
            self._by_kernels = runner.graphs.beside(decoder, runner.kv)
        self._rows = Rows(decoder)
        self.on = False
        self.passes: list[list[OpEvent]] = []

    @property
    def experts_used(self) -> int:
        program = self._runner.program
        return program.experts_used if self.on and program else self._runner.experts_used

    def forward(self, step: Step) -> Tensor:
        program = self._runner.program
        if not self.on:
            logits = self._runner.forward(step)
            if self._device.type == "cuda":  # or what waits for the result takes the pass's time
                torch.cuda.synchronize(self._device)
            return logits
        if program is None:
            by = self._runner.forward
            timer = OpTimer(self._rows)
            if self._runner.graphs is not None:
                by = partial(self._runner.by, self._by_kernels)
            if self._device.type == "cuda":
                timer = GpuOpTimer(self._rows, self._device)
            with timer:
                logits = by(step)
            self.passes.append(timer.take())
            return logits
        times = torch.empty(len(program.calls) + 1, dtype=torch.float64)
        if self.vocabulary is not None:
            step = self.vocabulary.narrow(step)
        with self.computing(step), self.together(lambda team: team.step(step, Kind.STEP)):
            logits = program(step, self.kv, times)
        starts: list[float] = times.tolist()
        self.passes.append(
            [
                OpEvent(self._rows.of(call.name, call.constants), call.name, start, end - start,
                        call.shapes)
                for call, (start, end) in zip(program.calls, pairwise(starts), strict=True)
            ]
        )  # fmt: skip
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of operator, of one pass."""

    op: str
    calls: float
    seconds: float
    share: float  # of the undisturbed pass
    bytes_moved: float  # weights, keys and values
    activation_bytes: float
    flops: float
    intensity: float  # FLOPs per byte moved; per byte of activations where only they move
    floor_s: float
    bound: str  # memory, compute; cache: nothing is moved but activations; –: nothing to count

    @property
    def achieved(self) -> float | None:
        """Floor ÷ time."""
        return self.floor_s / self.seconds if self.floor_s and self.seconds else None


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """A prompt's steps, or one step that decodes."""

    name: str
    what: str  # `1 × 512 tokens`
    seconds: float  # undisturbed: the median pass
    forward_s: float
    ops_s: float  # all operators
    parts: dict[str, float]  # seconds of that pass outside of the forward pass
    floor: Floor
    rows: list[Row]
    experts: float | None = None  # read in a layer and step, on average; None: there are none

    @property
    def between_s(self) -> float:
        """The forward pass beyond its operators: Python, less what the clock costs."""
        return self.forward_s - self.ops_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": self.what,
            "seconds": self.seconds,
            "forward_s": self.forward_s,
            "ops_s": self.ops_s,
            "between_ops_s": self.between_s,
            **{f"{part}_s": seconds for part, seconds in self.parts.items()},
            "floor_s": self.floor.seconds,
            "share_of_floor": self.floor.seconds / self.seconds,
            "bound": self.floor.bound,
            "experts_read": self.experts,
            "ops": [{**asdict(row), "achieved": row.achieved} for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """Both phases, what they ran on, and the spans of the timed run."""

    setup: dict[str, Any]
    environment: dict[str, Any]
    peaks: AnyPeaks
    phases: list[PhaseProfile]
    spans: list[Span]
    gaps: Gaps | None = None  # of a GPU, while it decodes
    why_no_gaps: str = ""  # on a GPU whose profiler doesn't run; empty on a CPU

    def as_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "benchmark": "profile",
            "setup": self.setup,
            "results": {phase.name: phase.as_dict() for phase in self.phases},
            "gaps": None if self.gaps is None else self.gaps.as_dict(),
            "peaks": asdict(self.peaks),
            **self.environment,
        }


@dataclass(frozen=True, slots=True)
class _Timed:
    """A step and its operators."""

    record: StepRecord
    events: list[OpEvent]


def run(config: EngineConfig, runtime: Runtime, workload: Workload) -> Profile:
    """Profile; takes four seconds beside the runs themselves."""
    runner = _TimedRunner(runtime.runner, runtime.model.model)
    meter, w = Meter(config, replace(runtime, runner=runner)), workload
    draw = np.random.default_rng(0)
    hardware, device = detect(), runtime.device
    run_batch(meter, draw, w.batch_size, min(w.input_len, 64), WARM_UP_STEPS + 1)
    measured = [measure_on(device, hardware)]
    plain = [run_once(meter, draw, w) for _ in range(w.repeats)]
    runner.on = True
    timed = [_timed(meter, runner, draw, w) for _ in range(w.repeats)]
    peaks = median_of([*measured, measure_on(device, hardware)])
    costs = meter.engine.ledger.costs
    phases = [
        _phase(
            "prefill", f"{w.batch_size} × {w.input_len} tokens", costs, peaks,
            [prefill for prefill, _ in plain], [prefill for prefill, _ in timed],
        ),
        _phase(
            "decode", f"{w.batch_size} × 1 token @ {w.context}", costs, peaks,
            [[r] for _, decode in plain for r in decode],
            [[t] for _, decode in timed for t in decode],
        ),
    ]  # fmt: skip
    last = [*timed[-1][0], *timed[-1][1]]
    runner.on = False
    found, why = _gaps(Meter(config, runtime), draw, w) if device.type == "cuda" else (None, "")
    return Profile(
        setup={**setup(meter), **asdict(w)},
        environment=environment(hardware),
        peaks=peaks,
        phases=phases,
        spans=[span for step in last for span in _spans(step, costs)],
        gaps=found,
        why_no_gaps=why,
    )


def _gaps(meter: Meter, draw: np.random.Generator, w: Workload) -> tuple[Gaps | None, str]:
    """Where the GPU stands still in steps that decode, as they run undisturbed; or why not."""
    prompts = random_prompts(draw, meter.runtime, w.batch_size, w.context)
    for i, prompt in enumerate(prompts):
        meter.engine.add_request(str(i), prompt, greedy(w.output_len + w.ahead))
    records: list[StepRecord] = []
    while len([r for r in records if not r.size.is_prefill]) < WARM_UP_STEPS:
        raise_errors(meter.step())
        records += meter.take()

    def run() -> None:
        for _ in range(max(w.output_len - WARM_UP_STEPS - 1, 1)):
            raise_errors(meter.step())

    try:
        return profiled(run), ""
    except (KernelError, RuntimeError) as error:
        return None, str(error).partition("\n")[0]
    finally:
        for i in range(len(prompts)):
            meter.engine.abort(str(i), report=False)


def decoding(
    config: EngineConfig, runtime: Runtime, workload: Workload
) -> list[tuple[StepRecord, float]]:
    """Steps that decode, and what each one's operators took in the same pass, seconds."""
    runner = _TimedRunner(runtime.runner, runtime.model.model)
    meter, draw = Meter(config, replace(runtime, runner=runner)), np.random.default_rng(0)
    run_batch(meter, draw, workload.batch_size, 64, WARM_UP_STEPS + 1)
    runner.on = True
    _, decode = _timed(meter, runner, draw, workload)
    return [(step.record, sum(event.seconds for event in step.events)) for step in decode]


def _timed(
    meter: Meter, runner: _TimedRunner, draw: np.random.Generator, workload: Workload
) -> tuple[list[_Timed], list[_Timed]]:
    """As `run_once`, each step with its operators."""
    runner.passes.clear()
    prefill, decode = run_once(meter, draw, workload)

    def with_events(record: StepRecord) -> _Timed:
        end = record.start + record.seconds
        return _Timed(record, next(p for p in runner.passes if record.start <= p[0].start <= end))

    return [with_events(r) for r in prefill], [with_events(r) for r in decode]


def _phase(
    name: str,
    what: str,
    costs: CostModel,
    peaks: AnyPeaks,
    plain: Sequence[list[StepRecord]],
    timed: Sequence[list[_Timed]],
) -> PhaseProfile:
    """A table of passes that do the same: each is a list of steps."""
    middle = sorted(plain, key=lambda steps: sum(r.seconds for r in steps))[len(plain) // 2]
    seconds = sum(r.seconds for r in middle)
    rows = _rows(costs, peaks, timed, seconds)
    floors = [floor_of(r.cost, peaks) for steps in plain for r in steps]
    return PhaseProfile(
        name=name,
        what=what,
        seconds=seconds,
        forward_s=sum(r.forward_s for r in middle),
        ops_s=sum(row.seconds for row in rows),
        parts={part: sum(getattr(r, f"{part}_s") for r in middle) for part in PARTS},
        floor=Floor(
            sum(f.memory_s for f in floors) / len(plain),
            sum(f.compute_s for f in floors) / len(plain),
        ),
        rows=rows,
        experts=_experts_read(costs, [step for steps in timed for step in steps]),
    )


def _experts_read(costs: CostModel, steps: Sequence[_Timed]) -> float | None:
    """In a layer that has some, on average over the steps; None where nobody counted."""
    layers = sum(layer.mlp.experts is not None for layer in costs.spec.layers)
    counts = [step.record.size.experts for step in steps]
    return sum(counts) / len(counts) / layers if layers and all(counts) else None


def _rows(
    costs: CostModel, peaks: AnyPeaks, passes: Sequence[list[_Timed]], whole_s: float
) -> list[Row]:
    """Calls and seconds: medians over the passes; bytes, FLOPs and floors: means."""
    calls: dict[str, list[int]] = {row: [] for row in (*OPS, OTHER)}
    times: dict[str, list[float]] = {row: [] for row in (*OPS, OTHER)}
    for steps in passes:
        events = [event for step in steps for event in step.events]
        for row, counts in calls.items():
            mine = [event.seconds for event in events if event.row == row]
            counts.append(len(mine))
            times[row].append(sum(mine))
    spent: dict[str, list[float]] = defaultdict(lambda: [0] * 5)
    for steps in passes:
        for step in steps:
            for op in costs.ops(step.record.size):
                floor = op_floor(op, peaks)
                each = (
                    op.bytes_moved, op.activation_bytes, op.flops, floor.memory_s, floor.compute_s
                )  # fmt: skip
                spent[op.op] = [a + b for a, b in zip(spent[op.op], each, strict=True)]
    return [
        _row(
            row,
            statistics.median(calls[row]),
            statistics.median(times[row]),
            whole_s,
            *(value / len(passes) for value in spent[row]),
        )
        for row in calls
        if any(calls[row])
    ]


def _row(
    name: str,
    calls: float,
    seconds: float,
    whole_s: float,
    moved: float,
    activations: float,
    flops: float,
    memory_s: float,
    compute_s: float,
) -> Row:
    floor = Floor(memory_s, compute_s)
    bound: str = floor.bound if moved else "cache" if activations else "–"
    return Row(
        op=name,
        calls=calls,
        seconds=seconds,
        share=seconds / whole_s,
        bytes_moved=moved,
        activation_bytes=activations,
        flops=flops,
        intensity=flops / (moved or activations or 1.0),
        floor_s=floor.seconds,
        bound=bound,
    )


def _spans(step: _Timed, costs: CostModel) -> list[Span]:
    """A step, its parts, and the operators of its forward pass."""
    record, size = step.record, step.record.size
    kind = "prefill" if size.is_prefill else "decode"
    about = {
        "sequences": len(size.queries),
        "tokens": size.tokens,
        "bytes_moved": record.cost.bytes_moved,
        "flops": record.cost.flops,
    }
    spans = [Span(f"step ({kind})", "step", record.start, record.seconds, about)]
    at = record.start
    for part in ("schedule", "batch", "forward", "sample", "detokenize", "output"):
        seconds = getattr(record, f"{part}_s")
        spans.append(Span(part, "engine", at, seconds))
        at += seconds
    rows = {row.op: row for row in costs.ops(size)}
    calls = {op: max(row.calls, 1) for op, row in rows.items()}
    for event in step.events:
        arguments: dict[str, Any] = {"operator": event.name, "shapes": event.shapes}
        if event.row in rows:
            row, n = rows[event.row], calls[event.row]
            arguments |= {"bytes_moved": row.bytes_moved // n, "flops": row.flops // n}
        name = event.row if event.row != OTHER else event.name
        spans.append(Span(name, "op", event.start, event.seconds, arguments))
    return spans

"""How many tokens a second many requests get that are all there at the start.

More requests than `max_num_seqs` queue; a freed row is filled in the same step. Prompts are random
token ids, decoding is greedy and never ends early, nothing is cached.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.bench.environment import environment, median_of
from penstock.bench.meter import Meter
from penstock.bench.report import (
    Column,
    Report,
    count,
    describe_lost,
    describe_peaks,
    percent,
    rate,
    seconds,
)
from penstock.bench.workload import (
    engine_config,
    greedy,
    overhead,
    raise_errors,
    random_prompts,
    setup,
    title,
)
from penstock.config import EngineConfig
from penstock.hardware import AnyPeaks, detect
from penstock.roofline import StepRecord, Totals, measure_on
from penstock.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run."""

    num_prompts: int
    input_len: int  # tokens
    output_len: int  # tokens
    max_num_seqs: int

    def config(self, model: str, **forms: Any) -> EngineConfig:
        """An engine that runs `max_num_seqs` of the requests at once."""
        return engine_config(
            model,
            max_model_len=self.input_len + self.output_len,
            max_num_seqs=self.max_num_seqs,
            **forms,
        )


def run(config: EngineConfig, runtime: Runtime, workload: Workload) -> Report:
    """Measure; takes two seconds beside the run itself."""
    meter, w = Meter(config, runtime), workload
    draw = np.random.default_rng(0)
    hardware, device = detect(), runtime.device
    _all(meter, random_prompts(draw, meter.runtime, 1, min(w.input_len, 64)), 3)
    prompts = random_prompts(draw, meter.runtime, w.num_prompts, w.input_len)
    before = measure_on(device, hardware)
    elapsed, records = _all(meter, prompts, w.output_len)
    peaks = median_of([before, measure_on(device, hardware)])
    return _report(meter, w, elapsed, records, peaks, environment(hardware))


def _all(meter: Meter, prompts: list[list[int]], output_len: int) -> tuple[float, list[StepRecord]]:
    """Seconds from the first request to the last token, and every step."""
    meter.take()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        meter.engine.add_request(str(i), prompt, greedy(output_len))
    while meter.engine.has_unfinished:
        raise_errors(meter.step())
    return time.perf_counter() - start, meter.take()


def _report(
    meter: Meter,
    workload: Workload,
    elapsed: float,
    records: list[StepRecord],
    peaks: AnyPeaks,
    where: dict[str, Any],
) -> Report:
    prompts = meter.phase([r for r in records if r.size.is_prefill], peaks)
    decode = meter.phase([r for r in records if not r.size.is_prefill], peaks)
    both = meter.phase(records, peaks)
    generated = workload.num_prompts * workload.output_len
    total = generated + workload.num_prompts * workload.input_len
    results = {
        "elapsed_s": elapsed,
        "requests_per_s": workload.num_prompts / elapsed,
        "output_tokens_per_s": generated / elapsed,
        "total_tokens_per_s": total / elapsed,
        "share_of_floor": both.floors_s / elapsed,
        "steps_with_prompts": prompts.as_dict(),
        "decode_steps": decode.as_dict(),
        "sequences_per_step": both.sequences / both.steps,
        "preemptions": meter.engine.stats()["preemptions"],
        "overhead": overhead(records),
    }
    columns = [
        *_columns("with prompts", prompts),
        *_columns("decoding", decode),
        Column(
            phase="whole run",
            time=seconds(elapsed),
            speed=f"{generated / elapsed:,.1f} generated",
            achieved=f"{both.bytes_moved / elapsed / 1e9:.1f} GB/s",
            of_peak=f"{percent(both.bytes_moved / elapsed / peaks.read_bytes_per_s)} read",
            floor=seconds(both.floors_s),
            share=both.floors_s / elapsed,
        ),
    ]
    remarks = [
        f"{workload.num_prompts} requests, {results['requests_per_s']:.2f} a second; "
        f"{results['total_tokens_per_s']:,.1f} tokens/s with the prompts'; "
        f"{results['sequences_per_step']:.1f} sequences a step.",
        *describe_lost({"Steps with prompts": prompts, "Decoding": decode}),
        describe_peaks(peaks, meter.compute),
    ]
    return Report(
        benchmark="throughput",
        title=title("Throughput", meter, where),
        setup={**setup(meter), **asdict(workload)},
        results=results,
        peaks=peaks,
        environment=where,
        columns=columns,
        remarks=remarks,
    )


def _columns(name: str, phase: Totals) -> list[Column]:
    """None for a phase that didn't occur."""
    if not phase.steps:
        return []
    if phase.bound == "memory":
        achieved = f"{phase.bytes_moved / phase.seconds / 1e9:.1f} GB/s"
        of_peak = f"{percent(phase.memory_s / phase.seconds)} read"
    else:
        achieved = rate(phase.flops / phase.seconds)
        of_peak = f"{percent(phase.compute_s / phase.seconds)} matrix"
    return [
        Column(
            phase=f"{count(phase.steps, 'step')} {name}",
            time=seconds(phase.seconds),
            speed=f"{phase.tokens_per_s:,.1f}",
            achieved=achieved,
            of_peak=of_peak,
            floor=f"{seconds(phase.floors_s)} {phase.bound}",
            share=phase.share or 0.0,
        )
    ]

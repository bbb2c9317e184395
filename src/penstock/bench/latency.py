"""How long a batch that starts together takes: its prompts, then each further token.

Prompts are random token ids, decoding is greedy and never ends early, nothing is cached. The peaks
are measured before, between and after the runs, and everything is a median: on a shared machine
the bandwidth of one minute isn't that of the next.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.bench.environment import environment, median_of
from penstock.bench.meter import Meter
from penstock.bench.report import (
    Column,
    Report,
    describe_lost,
    describe_peaks,
    percent,
    rate,
    seconds,
)
from penstock.bench.workload import (
    TOKENS_A_STEP,
    engine_config,
    overhead,
    run_batch,
    setup,
    title,
)
from penstock.config import CacheConfig, EngineConfig
from penstock.hardware import AnyPeaks, detect
from penstock.roofline import StepRecord, Totals, measure_on
from penstock.runtime import Runtime

WARM_UP_STEPS = 2
"""Steps of each run that don't count as decoding: caches and branch predictors settle."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run."""

    input_len: int  # tokens
    output_len: int  # tokens
    batch_size: int
    context: int  # tokens in the cache when decoding starts
    repeats: int

    @property
    def ahead(self) -> int:
        """Tokens that the first sequences may have generated when the last one's prompt is read."""
        tokens = self.batch_size * max(self.input_len, self.context)
        return -(-tokens // max(TOKENS_A_STEP - self.batch_size, 1)) - 1

    def config(self, model: str, **forms: Any) -> EngineConfig:
        """An engine that runs it in one batch, with a cache that holds it all."""
        length = max(self.input_len, self.context) + self.output_len + self.ahead
        spare = 1  # a block to grow into, which the scheduler wants for each before it starts all
        return engine_config(
            model,
            max_model_len=length,
            num_blocks=self.batch_size * (-(-length // CacheConfig().block_size) + spare),
            max_num_seqs=self.batch_size,
            **forms,
        )


def run(config: EngineConfig, runtime: Runtime, workload: Workload) -> Report:
    """Measure; takes two seconds beside the runs themselves."""
    meter, w = Meter(config, runtime), workload
    draw = np.random.default_rng(0)
    hardware, device = detect(), runtime.device
    run_batch(meter, draw, w.batch_size, min(w.input_len, 64), WARM_UP_STEPS + 1)
    measured = [measure_on(device, hardware)]
    prefills: list[list[StepRecord]] = []
    decodes: list[StepRecord] = []
    for _ in range(w.repeats):
        prefill_steps, decode_steps = run_once(meter, draw, w)
        prefills.append(prefill_steps)
        decodes += decode_steps
        measured.append(measure_on(device, hardware))
    peaks = median_of(measured)
    prefill = _median_prefill([meter.phase(records, peaks) for records in prefills])
    return _report(meter, w, prefill, decodes, peaks, environment(hardware))


def run_once(
    meter: Meter, draw: np.random.Generator, w: Workload
) -> tuple[list[StepRecord], list[StepRecord]]:
    """The steps of the prompts, and those in which every sequence decodes."""
    together, tokens = w.context == w.input_len, w.output_len + w.ahead
    records = run_batch(meter, draw, w.batch_size, w.input_len, tokens if together else 1)
    prefill = [r for r in records if r.size.is_prefill]
    if not together:
        records = run_batch(meter, draw, w.batch_size, w.context, tokens)
    decode = [r for r in records if r.size.tokens == len(r.size.queries) == w.batch_size]
    decode = [r for r in decode if not r.size.is_prefill][: w.output_len - 1]
    return prefill, decode[WARM_UP_STEPS:] or decode


def _median_prefill(phases: list[Totals]) -> Totals:
    return sorted(phases, key=lambda phase: phase.seconds)[len(phases) // 2]


def _report(
    meter: Meter,
    workload: Workload,
    prefill: Totals,
    decodes: list[StepRecord],
    peaks: AnyPeaks,
    where: dict[str, Any],
) -> Report:
    decode = meter.phase(decodes, peaks)
    step_s = statistics.median(r.seconds for r in decodes)
    floor, moved = decode.floors_s / decode.steps, decode.bytes_moved / decode.steps
    flops_per_s = prefill.flops / prefill.seconds
    results: dict[str, dict[str, Any]] = {
        "prefill": {
            **prefill.as_dict(),
            "flops_per_s": flops_per_s,
            "share_of_matrix_peak": flops_per_s / peaks.of(meter.compute),
        },
        "decode": {
            "steps": decode.steps,
            "step_s": step_s,
            "tokens_per_s": workload.batch_size / step_s,
            "bytes_per_step": moved,
            "flops_per_step": decode.flops / decode.steps,
            "bytes_per_s": moved / step_s,
            "share_of_bandwidth": moved / step_s / peaks.read_bytes_per_s,
            "floor_s": floor,
            "share_of_floor": floor / step_s,
            "bound": decode.bound,
        },
        "overhead": overhead(decodes),
    }
    return Report(
        benchmark="latency",
        title=title("Latency", meter, where),
        setup={**setup(meter), **asdict(workload)},
        results=results,
        peaks=peaks,
        environment=where,
        columns=_columns(workload, results["prefill"], results["decode"]),
        remarks=[
            *describe_lost({"Prefill": prefill, "Decode": decode}),
            describe_peaks(peaks, meter.compute),
        ],
    )


def _columns(workload: Workload, prefill: dict[str, Any], decode: dict[str, Any]) -> list[Column]:
    return [
        Column(
            phase=f"prefill {workload.batch_size} × {workload.input_len}",
            time=seconds(prefill["seconds"]),
            speed=f"{prefill['tokens_per_s']:,.1f}",
            achieved=rate(prefill["flops_per_s"]),
            of_peak=f"{percent(prefill['share_of_matrix_peak'])} matrix",
            floor=f"{seconds(prefill['floor_s'])} {prefill['bound']}",
            share=prefill["share_of_floor"],
        ),
        Column(
            phase=f"decode {workload.batch_size} × 1 @ {workload.context}",
            time=f"{seconds(decode['step_s'])} a step",
            speed=f"{decode['tokens_per_s']:,.1f}",
            achieved=f"{decode['bytes_per_s'] / 1e9:.1f} GB/s",
            of_peak=f"{percent(decode['share_of_bandwidth'])} read",
            floor=f"{seconds(decode['floor_s'])} {decode['bound']}",
            share=decode["share_of_floor"],
        ),
    ]

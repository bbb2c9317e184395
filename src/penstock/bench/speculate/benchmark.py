"""`penstock bench speculate`, one workload after the other on one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.bench.environment import environment, median_of
from penstock.bench.meter import Meter
from penstock.bench.speculate.figures import figures_of
from penstock.bench.speculate.floors import draft_floor, memory_of
from penstock.bench.speculate.planted import METHOD, Planted
from penstock.bench.speculate.prompts import (
    Workload,
    encode,
    encode_outputs,
    encode_predictions,
)
from penstock.bench.speculate.result import SpeculateResult
from penstock.bench.speculate.runs import Show, in_waves, measure_runs
from penstock.bench.workload import TOKENS_A_STEP, longest, setup, title
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.hardware import detect
from penstock.roofline import measure_on
from penstock.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Options:
    """What is run."""

    drafts: SpeculativeConfig | Planted
    max_tokens: int  # of an output
    batch_size: int
    temperature: float
    rounds: int
    seed: int

    @property
    def planted(self) -> Planted | None:
        """How guesses are planted, where they are."""
        return self.drafts if isinstance(self.drafts, Planted) else None

    def config(self, model: str, workloads: Sequence[Workload], **forms: Any) -> EngineConfig:
        """An engine that finds nothing in its cache; `forms`: dtype, quantization, …"""
        room = max(one.most_tokens for one in workloads) + self.max_tokens
        drafts = self.drafts
        if isinstance(drafts, Planted):  # for room in a cache with a window; it is never asked
            drafts = SpeculativeConfig("ngram", drafts.num_speculative_tokens)
        most = max(TOKENS_A_STEP, self.batch_size)
        if self.batch_size > TOKENS_A_STEP:
            forms = {**forms, "max_num_batched_tokens": most}
        config = EngineConfig.of(
            model=model,
            skip_tokenizer_init=not any(one.is_text for one in workloads),
            enable_prefix_caching=False,
            max_model_len=min(room, longest(model)),
            max_num_seqs=self.batch_size,
            speculative_config=drafts,
            **forms,
        )
        return config.suggesting(max_num_batched_tokens=most)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without what isn't set."""
        method = self.drafts.method if isinstance(self.drafts, SpeculativeConfig) else METHOD
        chosen = {name: value for name, value in asdict(self.drafts).items() if value is not None}
        if "model" in chosen:
            chosen["model"] = str(chosen["model"])
        return {**asdict(self), "drafts": {"method": method, **chosen}}


def run(
    config: EngineConfig,
    runtime: Runtime,
    workloads: Sequence[Workload],
    options: Options,
    show: Show,
) -> SpeculateResult:
    """Measure; takes four seconds beside the runs themselves."""
    o, hardware = options, detect()
    _check_predictions(workloads, o)
    encoded = [
        (
            encode(one, runtime, o.max_tokens),
            encode_outputs(one, runtime),
            encode_predictions(one, runtime),
        )
        for one in workloads
    ]
    meter = Meter(replace(config, speculative=None), runtime)
    where = environment(hardware)
    about = {**setup(meter), **o.as_dict()}
    heading = title("Speculation", meter, where)
    floor = draft_floor(config, runtime, o.planted)
    before = measure_on(runtime.device, hardware)
    measured = [
        measure_runs(
            workload.name, config, runtime,
            in_waves(prompts, o.batch_size, o.max_tokens, o.temperature, o.seed, *known),
            o.rounds, o.planted, show,
        )
        for workload, (prompts, *known) in zip(workloads, encoded, strict=True)
    ]  # fmt: skip
    peaks = median_of([before, measure_on(runtime.device, hardware)])
    return SpeculateResult(
        title=heading,
        setup=about,
        environment=where,
        memory=memory_of(runtime),
        workloads=[figures_of(one, peaks, floor) for one in measured],
        peaks=peaks,
        compute=meter.compute,
    )


def _check_predictions(workloads: Sequence[Workload], options: Options) -> None:
    """Raises ConfigError where nobody would guess by them."""
    by = options.drafts
    reads = isinstance(by, SpeculativeConfig) and by.reads_predictions
    for one in workloads:
        if one.predictions and not reads:
            raise ConfigError(
                f'{one.name} has "prediction", by which --method ngram and suffix guess, and no '
                "other does. Give one of these, or leave it out of the file."
            )

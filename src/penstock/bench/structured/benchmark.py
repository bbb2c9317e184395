"""The parts of `penstock bench structured`, one after the other on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.bench.environment import environment
from penstock.bench.meter import Meter
from penstock.bench.structured.compiling import Show, compile_all
from penstock.bench.structured.outputs import run_outputs
from penstock.bench.structured.result import StructuredResult
from penstock.bench.structured.runs import PROMPT
from penstock.bench.structured.schemas import Schema
from penstock.bench.structured.speed import run_jumps, run_overhead
from penstock.bench.workload import setup, title
from penstock.config import EngineConfig
from penstock.hardware import detect
from penstock.runtime import Runtime, load_runtime

PARTS: Final = ("compile", "outputs", "overhead", "jumps")
"""What is measured; the schemas are always compiled."""

MOST_PROMPT_TOKENS: Final = 40
"""Of the prompt, in any vocabulary of at least single bytes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is run."""

    num_prompts: int | None  # outputs; None: one for each schema
    max_num_seqs: int
    max_tokens: int  # of an output
    rounds: int  # of what is timed
    seed: int
    parts: tuple[str, ...] = PARTS

    def config(self, model: str, **forms: Any) -> EngineConfig:
        """An engine that finds nothing in its cache; `forms`: dtype, tokenizer, …"""
        return EngineConfig.of(
            model=model,
            enable_prefix_caching=False,
            max_model_len=self.max_tokens + MOST_PROMPT_TOKENS,
            max_num_seqs=self.max_num_seqs,
            **forms,
        )


def run(
    config: EngineConfig,
    runtime: Runtime,
    schemas: Sequence[Schema],
    source: Path | None,
    options: Options,
    show: Show,
    second: Callable[[EngineConfig], Runtime] = load_runtime,
) -> StructuredResult:
    """Measure; source: where the schemas are from; second: loads the same model again, to take
    turns with the first.
    """
    o = options
    meter = Meter(config, runtime)
    where = environment(detect())
    about = {
        **setup(meter),
        "vocabulary": runtime.vocab_size,
        "schemas": "built in" if source is None else source.name,
        **asdict(options),
    }
    tokenizer = runtime.tokenizer
    assert tokenizer is not None  # `config` asks for one
    prompt = tokenizer.encode(PROMPT)
    compiled = compile_all(runtime, schemas, show)
    result = StructuredResult(title("Structured outputs", meter, where), about, where, compiled)
    found = compiled.schemas
    if "outputs" in o.parts:
        number = len(found) if o.num_prompts is None else o.num_prompts
        result.outputs = run_outputs(meter, found, number, o.max_tokens, o.seed, prompt, show)
    without = without_jumps(config)
    if "overhead" in o.parts:
        result.overhead = run_overhead(
            without, (runtime, second(config)), found, o.max_tokens, o.seed, o.rounds, prompt, show
        )
    for compact in (False, True) if "jumps" in o.parts else ():
        result.jumps.append(
            run_jumps(
                (config, without), runtime, found, o.max_tokens, o.seed, o.rounds, prompt, show,
                compact=compact,
            )
        )  # fmt: skip
    return result


def without_jumps(config: EngineConfig) -> EngineConfig:
    """The same engine, which takes a step for every token."""
    return replace(config, scheduler=replace(config.scheduler, enable_jump_forward=False))

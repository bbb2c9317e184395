"""An engine that is given schemas to follow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.bench.meter import Meter
from penstock.bench.structured.compiling import Show
from penstock.bench.structured.schemas import Schema
from penstock.engine import RequestOutput
from penstock.errors import RequestError
from penstock.sampling import SamplingParams, StructuredOutputs

PROMPT: Final = "The answer, as JSON:\n"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a schema, and how it is to be followed."""

    name: str
    schema: Schema
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    name: str
    schema: Schema
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length"; "error", or None where it was refused
    error: Exception | None


def pick(schemas: Sequence[Schema], count: int) -> list[Schema]:
    """`count` of them, evenly spread; all of them several times where they are fewer."""
    if count >= len(schemas):
        return [schemas[i % len(schemas)] for i in range(count)]
    return [schemas[i * len(schemas) // count] for i in range(count)]


def jobs_of(
    schemas: Iterable[Schema], max_tokens: int, seed: int, *, compact: bool = False
) -> list[Job]:
    """Each schema at temperature 1, with a seed of its own."""
    return [
        Job(
            schema.name,
            schema,
            SamplingParams(
                temperature=1.0,
                max_tokens=max_tokens,
                seed=seed + i,
                structured_outputs=StructuredOutputs(
                    json=schema.document, disable_any_whitespace=compact
                ),
            ),
        )
        for i, schema in enumerate(schemas)
    ]


def run_jobs(
    meter: Meter, jobs: Sequence[Job], prompt: Sequence[int], show: Show
) -> tuple[float, list[Answer]]:
    """Run them all, a few waiting at a time; seconds, and the answers in their order."""
    engine = meter.engine
    waiting = iter(enumerate(jobs))
    answers: dict[int, Answer] = {}
    most = 2 * engine.config.scheduler.max_num_seqs
    start = time.perf_counter()
    while len(answers) < len(jobs):
        for i, job in islice(waiting, max(most - len(engine.requests), 0)):
            try:
                engine.add_request(str(i), prompt, job.params)
            except RequestError as error:
                answers[i] = Answer(job.name, job.schema, "", [], None, error)
        for output in meter.step() if engine.has_unfinished else ():
            i = int(output.request_id)
            answers[i] = _answer(jobs[i], output)
        show("generating", len(answers), len(jobs))
    return time.perf_counter() - start, [answers[i] for i in range(len(jobs))]


def _answer(job: Job, output: RequestOutput) -> Answer:
    (one,) = output.outputs
    reason = one.finish_reason
    return Answer(job.name, job.schema, one.text, list(one.token_ids), reason, output.error)

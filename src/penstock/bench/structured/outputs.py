"""Whether what comes out follows its schema, by another program's judgement."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from penstock.bench.meter import Meter
from penstock.bench.structured.compiling import Show, reason_of
from penstock.bench.structured.runs import Answer, jobs_of, pick, run_jobs
from penstock.bench.structured.schemas import Schema

HOW_TO_GET_IT: Final = (
    "jsonschema isn't installed, so outputs aren't validated: pip install jsonschema"
)

_SHOWN: Final = 200  # characters of an output
_DIGITS: Final = 300  # that an exact number may have before or after its point


@dataclass(slots=True)
class Outputs:
    """What the runs of all schemas came to."""

    runs: int
    seconds: float
    tokens: int
    finished: int = 0
    cut: int = 0  # at max_tokens
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    validated: bool = False  # whether jsonschema is installed
    valid: int = 0
    invalid: list[dict[str, str]] = field(default_factory=list)
    unread: list[dict[str, str]] = field(default_factory=list)  # schemas that jsonschema can't read

    @property
    def problems(self) -> list[str]:
        """What must not be."""
        return [f"{one['schema']}: {one['problem']}" for one in self.invalid]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "runs": self.runs,
            "finished": self.finished,
            "cut": self.cut,
            "failed": dict(self.failed.most_common()),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "output_tokens_per_s": self.tokens / self.seconds,
            "validated_by": "jsonschema" if self.validated else None,
            "valid": self.valid,
            "invalid": self.invalid,
            "schemas_it_cannot_read": self.unread,
        }


def run_outputs(
    meter: Meter,
    schemas: Sequence[Schema],
    num_prompts: int,
    max_tokens: int,
    seed: int,
    prompt: Sequence[int],
    show: Show,
) -> Outputs:
    """Let the model write, and have every finished output judged."""
    jobs = jobs_of(pick(schemas, num_prompts), max_tokens, seed)
    elapsed, answers = run_jobs(meter, jobs, prompt, show)
    return judge(answers, elapsed)


def judge(answers: Sequence[Answer], elapsed: float) -> Outputs:
    """Count them, and validate those that ended by themselves."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    found = Outputs(len(answers), elapsed, tokens)
    found.validated = importlib.util.find_spec("jsonschema") is not None
    for answer in answers:
        if answer.error is not None:
            found.failed[reason_of(str(answer.error))] += 1
        elif answer.finish_reason == "length":
            found.cut += 1
        else:
            found.finished += 1
            if found.validated:
                _validate(answer, found)
    return found


def _validate(answer: Answer, found: Outputs) -> None:
    """Enter one output."""
    try:
        problem = _problem(answer, float) and _problem(answer, _exact)
    except Exception as error:  # whatever the package raises of a schema that it can't read
        found.unread.append({"schema": answer.name, "problem": f"{error!r:.200}"})
        return
    if not problem:
        found.valid += 1
        return
    found.invalid.append(
        {"schema": answer.name, "problem": problem[:_SHOWN], "output": answer.text[:_SHOWN]}
    )


def _problem(answer: Answer, number: Callable[[str], Any]) -> str:
    """Why an output isn't valid; formats count too, those that the package knows.

    number: reads what isn't an integer. By floats, as the package means it, 32.33 is no multiple of
    0.01, so what fails is read again exactly.
    """
    from jsonschema import ValidationError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(answer.schema.text, parse_float=number)
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        value = json.loads(answer.text, parse_float=number)
    except ValueError as error:
        return f"it isn't JSON: {error}"
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)
    except ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return ""


def _exact(text: str) -> int | float | Fraction:
    """A number as it is written; one beyond a float's range as that."""
    value = Decimal(text)
    if abs(value.adjusted()) > _DIGITS:
        return float(text)
    return int(value) if value == value.to_integral_value() else Fraction(value)

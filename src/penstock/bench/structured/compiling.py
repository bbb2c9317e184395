"""Which schemas can be followed, and how long it takes to find out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.bench.structured.schemas import Schema
from penstock.errors import ConfigError, InvalidSamplingError
from penstock.grammar import Grammars
from penstock.runtime import Runtime
from penstock.sampling import StructuredOutputs

Show = Callable[[str, int, int], None]

_AT_ONCE: Final = 256
"""Schemas between their two rounds: fewer than a cache keeps."""

_EXAMPLES: Final = 3
_WAY_OUT: Final = re.compile(r"(?<=[.)]) (Change|Leave|Make) .*$", re.DOTALL)
_QUOTED: Final = re.compile(r"(?<!\w)'([^']*)'(?!\w)")  # a word of JSON Schema stays
_OPENING: Final = re.compile(r"^structured_outputs\.\w+ can't be followed(?: at \S+)?: ")


@dataclass(slots=True)
class Refusals:
    """Schemas that are refused for one reason."""

    names: list[str] = field(default_factory=list)
    message: str = ""  # of the first


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of all schemas."""

    schemas: list[Schema]  # those that can be followed
    refused: dict[str, Refusals]  # by reason, the commonest first
    seconds: list[float]  # of each, in the first round
    hits: int  # in the second
    hit_s: float  # the median of those

    @property
    def total(self) -> int:
        return len(self.seconds)

    @property
    def num_refused(self) -> int:
        return self.total - len(self.schemas)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        return {
            "schemas": self.total,
            "compiled": len(self.schemas),
            "share": len(self.schemas) / self.total,
            "compile_ms": spread([s * 1e3 for s in self.seconds]),
            "second_round": {"hits": self.hits, "hit_ms": self.hit_s * 1e3},
            "refused": [
                {
                    "reason": reason,
                    "count": len(found.names),
                    "examples": found.names[:_EXAMPLES],
                    "message": found.message,
                }
                for reason, found in self.refused.items()
            ],
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles, the largest and the mean."""
    p50, p90, p99 = (float(one) for one in np.percentile(values, (50, 90, 99)))
    mean = sum(values) / len(values)
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(values), "mean": mean}


def compile_all(runtime: Runtime, schemas: Sequence[Schema], show: Show) -> Compiled:
    """Compile each, and ask again: the second time it is in the cache. Raises ConfigError."""
    tokenizer = runtime.tokenizer
    assert tokenizer is not None  # the benchmark's engine has asked for one
    grammars = Grammars(
        tokenizer, runtime.vocab_size, runtime.model.eos_token_ids, runtime.vocab_map
    )
    grammars.compile(StructuredOutputs(json_object=True))  # makes the vocabulary
    found: list[Schema] = []
    refused: dict[str, Refusals] = {}
    first: list[float] = []
    second: list[float] = []
    hits = 0
    for start in range(0, len(schemas), _AT_ONCE):
        part = schemas[start : start + _AT_ONCE]
        for i, schema in enumerate(part):
            show("compiling", start + i, len(schemas))
            seconds, message = _compile(grammars, schema)
            first.append(seconds)
            if message is None:
                found.append(schema)
                continue
            same = refused.setdefault(reason_of(message), Refusals(message=message))
            same.names.append(schema.name)
        before = grammars.stats().hits
        second += [_compile(grammars, schema)[0] for schema in part]
        hits += grammars.stats().hits - before
    if not found:
        raise ConfigError(
            f"None of {len(schemas)} schemas can be followed. The first: "
            f"{next(iter(refused.values())).message}"
        )
    ordered = sorted(refused.items(), key=lambda one: -len(one[1].names))
    return Compiled(found, dict(ordered), first, hits, float(np.median(second)))


def _compile(grammars: Grammars, schema: Schema) -> tuple[float, str | None]:
    """Seconds, and why it can't be followed."""
    start = time.perf_counter()
    try:
        grammars.compile(StructuredOutputs(json=schema.document))
    except InvalidSamplingError as error:
        return time.perf_counter() - start, str(error)
    return time.perf_counter() - start, None


def reason_of(message: str) -> str:
    """A refusal without what only this schema has: places, names, numbers."""
    text = _WAY_OUT.sub("", _OPENING.sub("", message))
    said, _, detail = text.rstrip(".").partition(" (llguidance: ")
    if said == "the library refuses it" and detail:
        said += f": {re.split(r'[;:]', detail)[0]}"
    said = re.sub(r"^the pattern .*, character \d+:", "a pattern:", said, flags=re.DOTALL)
    said = _QUOTED.sub(lambda m: m[0] if m[1].isalpha() else "…", said)
    said = re.sub(r"^no value follows it \(.*", "no value follows it", said, flags=re.DOTALL)
    return re.sub(r"\d+", "N", said)[:160]

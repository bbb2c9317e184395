"""How large a schema may be: counted before any work, so that a refusal comes at once.

The bounds are a multiple of what real schemas need (of 5,707 the largest that can be followed has
2,293 schemas, 412 names in one object and 3,323 characters of patterns), and keep what is refused
later, by the library, within a second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.shape import check_shape
from penstock.grammar.subschemas import Schema, reachable
from penstock.sampling.structured import MOST_LITERAL

MOST_SCHEMAS: Final = 10_000
MOST_SQUARED: Final = 8_000_000  # names of an object, squared, in all: what compiling takes
MOST_VALUES: Final = 40_000  # of all enums and constants; the library's fuel is a dozen a value
MOST_PATTERN_CHARACTERS: Final = 100_000
HIGHEST_MULTIPLE: Final = 100_000  # its digits as a whole number: the states that a multiple takes


def check_size(document: Schema) -> None:
    """Raises Refusal for what isn't a schema, and for more than can be compiled in time."""
    counted = _Counted()
    for path, schema in reachable(document):
        try:
            check_shape(schema)
            counted.add(schema)
        except Refusal as refusal:
            raise refusal.at(pointer(path)) from refusal


def check_count(document: Schema) -> None:
    """Raises Refusal where writing it otherwise has made too many schemas of it."""
    count = sum(1 for _ in reachable(document))
    if count > MOST_SCHEMAS:
        raise Refusal(
            f"written without not, oneOf, if and dependencies it holds {count:,} schemas; at most "
            f"{MOST_SCHEMAS:,} can be compiled in time",
            "#",
        )


class _Counted:
    """What has been seen of a document so far."""

    def __init__(self) -> None:
        self.schemas = self.squared = self.values = self.characters = 0
        self.multiples: set[int] = set()

    def add(self, schema: dict[str, Any]) -> None:
        """One more schema. Raises Refusal, with the keyword as its place."""
        self.schemas += 1 + sum(len(schema.get(key, ())) for key in _DEPENDENCIES)
        if self.schemas > MOST_SCHEMAS:
            raise Refusal(f"more than {MOST_SCHEMAS:,} schemas can't be compiled in time")
        self._add_names(schema)
        self._add_values(schema)
        self._add_patterns(schema)
        self._add_multiple(schema)

    def _add_names(self, schema: dict[str, Any]) -> None:
        for key in ("properties", "required"):
            names = schema.get(key)
            count = len(names) if isinstance(names, (dict, list)) else 0
            self.squared += count**2
            if self.squared > MOST_SQUARED:
                raise Refusal(
                    f"{count:,} names, which take too long to compile beside those before them: "
                    f"properties and required together may have {math.isqrt(MOST_SQUARED):,} in "
                    f"one object, or {math.isqrt(MOST_SQUARED // 2):,} each, or fewer in each of "
                    "several",
                    f"/{key}",
                )

    def _add_values(self, schema: dict[str, Any]) -> None:
        for key, values in (("enum", schema.get("enum", ())), ("const", [schema.get("const")])):
            longest = max((len(value) for value in values if isinstance(value, str)), default=0)
            if longest > MOST_LITERAL:
                raise Refusal(
                    f"a text of {longest:,} characters; at most {MOST_LITERAL:,} can be followed",
                    f"/{key}",
                )
            for weight in itertools.chain.from_iterable(map(_weights, values)):
                self.values += weight
                if self.values > MOST_VALUES:
                    raise Refusal(
                        f"{len(values):,} values; at most {MOST_VALUES:,} can be compiled in time, "
                        "in all enums and constants together (a list and an object count twice "
                        "beside what they hold, and so does a key)",
                        f"/{key}",
                    )

    def _add_patterns(self, schema: dict[str, Any]) -> None:
        named = {"pattern": [schema.get("pattern", "")]}
        named["patternProperties"] = list(schema.get("patternProperties", ()))
        for key, patterns in named.items():
            self.characters += sum(map(len, patterns))
            if self.characters > MOST_PATTERN_CHARACTERS:
                raise Refusal(
                    f"the patterns up to here have {self.characters:,} characters; at most "
                    f"{MOST_PATTERN_CHARACTERS:,} can be compiled in time",
                    f"/{key}",
                )

    def _add_multiple(self, schema: dict[str, Any]) -> None:
        if "multipleOf" not in schema:
            return
        multiple = schema["multipleOf"]
        self.multiples.add(_digits(multiple))
        # Where several meet in one number it must be a multiple of all.
        together = max(sum(self.multiples), math.lcm(*self.multiples))
        if together > HIGHEST_MULTIPLE:
            raise Refusal(
                f"{multiple} is too fine, alone or beside others: what all are multiples of has "
                f"{together:,} steps, and at most {HIGHEST_MULTIPLE:,} can be followed",
                "/multipleOf",
            )


_DEPENDENCIES: Final = ("dependencies", "dependentRequired", "dependentSchemas")


def _weights(value: Any) -> Iterator[int]:
    """One a value, and what the parts of lists and objects add."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield 2 + 2 * len(one)
            waiting += one.values()
        elif isinstance(one, list):
            yield 2
            waiting += one
        else:
            yield 1


def _digits(number: float) -> int:
    """2.50 → 25, 1200 → 12: what remains without the power of ten."""
    whole = "".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))
    return int(whole)

"""Numbers that the library can't hold as they are: it has floats, and integers of 64 bits.

Beyond 2⁵³ not every integer is a float, so a constant would be written as another one, and a bound
lie elsewhere. Below −2⁶³ the library's integers end, and with them the process: it negates the
lowest one for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from penstock.grammar.refusal import Refusal

EXACT: Final = 1 << 53
"""Up to here every integer is a float."""

MOST: Final = (1 << 63) - 1024
"""The largest float that is an integer of 64 bits."""

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def settle(schema: dict[str, Any]) -> None:
    """Move bounds to the next number within them that the library holds as it is.

    Raises Refusal, with the keyword as its place, for a value that can't be moved.
    """
    for key in ("const", "enum"):
        for value in numbers(schema.get(key)):
            if value < -MOST or not _is_kept(value):
                raise Refusal(
                    f"the number {value!r:.60} can't be written as it is: from {EXACT:,} on not "
                    "every integer can be told from the next. Make it a text",
                    f"/{key}",
                )
    given = {key: schema[key] for key in (*_LOW, *_HIGH) if _is_number(schema.get(key))}
    for key, value in given.items():
        schema[key] = _moved(key, value, _kinds(schema))
    for low in _LOW:
        for high in _HIGH:
            if low in given and high in given and given[low] <= given[high]:
                if schema[low] > schema[high]:
                    raise Refusal(
                        f"from {given[low]} to {given[high]} lies no number that can be told from "
                        f"those beyond: from {EXACT:,} on not every integer can",
                        f"/{low}",
                    )


def check_lowest(document: Any) -> None:
    """Raises Refusal for a number, wherever it is, that would end the process."""
    for value in numbers(document):
        if value < -MOST:
            raise Refusal(f"the number {value!r:.60} is too low; it may be {-MOST:,} at least")


def numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value, in lists and objects too."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif _is_number(one):
            yield one


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kinds(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def _is_kept(value: float) -> bool:
    """Whether the library writes an integer as it is."""
    if not isinstance(value, int) or abs(value) <= EXACT:
        return True
    try:
        near = float(value)
    except OverflowError:
        return False
    return value == (int(near) if abs(value) <= MOST else int(Decimal(repr(near))))


def _moved(key: str, value: float, kinds: list[Any]) -> float:
    """A bound, or the next number within it."""
    whole = "integer" in kinds and "number" not in kinds
    if (key in _HIGH and value < -MOST) or (whole and key in _LOW and value > MOST):
        raise Refusal(f"the bound {value!r:.60} is beyond ±{MOST:,}", f"/{key}")
    if abs(value) <= EXACT:
        return value
    exact = Decimal(repr(value))
    try:
        near = float(value)
    except OverflowError as error:
        raise Refusal("the bound is larger than any float", f"/{key}") from error
    if whole:
        near = max(-MOST, min(MOST, near))
    inward = math.inf if key in _LOW else -math.inf
    while not _within(near, exact, key in _LOW):
        near = math.nextafter(near, inward)
    return int(near) if abs(near) <= MOST else near


def _within(near: float, bound: Decimal, low: bool) -> bool:
    """Whether a float keeps a bound as the library writes it: in short, or as an integer."""
    written = [Decimal(repr(near))]
    if abs(near) <= MOST:
        written.append(Decimal(int(near)))
    return min(written) >= bound if low else max(written) <= bound

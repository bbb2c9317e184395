"""Numbers that the library can't hold as they are: it has floats, and integers of 64 bits.

Beyond 2⁵³ not every integer is a float, so a constant would be written as another one, and a bound
lie elsewhere. Below −2⁶³ the library's integers end, and with them the process: it negates the
lowest one for ever. It takes a fraction with more than 15 digits for the integer beside it, and an
integer that is excluded for one that isn't, where the other bound is less than 1 away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from penstock.grammar.refusal import Refusal

EXACT: Final = 1 << 53
"""Up to here every integer is a float."""

MOST: Final = (1 << 63) - 1024
"""The largest float that is an integer of 64 bits."""

DIGITS: Final = 15
"""Of a bound with a fraction."""

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
    given = _bounds(schema)
    for key, value in given.items():
        schema[key] = _moved(key, value, _kinds(schema))
    for side, exclusive in (_LOW, _HIGH):
        if exclusive in given and not _is_whole(_kinds(schema)):
            _include(schema, side, exclusive)
    from_, to = _ends(given)
    low, high = _ends(_bounds(schema))
    if low > high and from_ <= to:
        raise Refusal(
            f"between {from_} and {to} lies no number that can be told from those beyond: of "
            f"fractions {DIGITS} digits count, and from {EXACT:,} on not every integer is kept",
            f"/{next(key for key in given if key in _LOW)}",
        )


def _bounds(schema: dict[str, Any]) -> dict[str, float]:
    return {key: schema[key] for key in (*_LOW, *_HIGH) if _is_number(schema.get(key))}


def _ends(bounds: dict[str, float]) -> tuple[float, float]:
    """The innermost low bound and high bound; infinity where there is none."""
    low = max((bounds[key] for key in _LOW if key in bounds), default=-math.inf)
    return low, min((bounds[key] for key in _HIGH if key in bounds), default=math.inf)


def _include(schema: dict[str, Any], side: str, exclusive: str) -> None:
    """An integer that is excluded: the next number of DIGITS digits bounds instead."""
    value = schema[exclusive]
    if not math.isfinite(value) or value != int(value):
        return
    places = DIGITS - _whole_digits(Decimal(value))
    if places < 1:
        return
    step = Decimal(1).scaleb(-places)
    inner = max if side in _LOW else min
    near = float(Decimal(value) + (step if side in _LOW else -step))
    schema[side] = inner(near, schema[side]) if _is_number(schema.get(side)) else near
    del schema[exclusive]


def _whole_digits(value: Decimal) -> int:
    """Before the point."""
    return max(value.adjusted() + 1, 0)


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


def _is_whole(kinds: list[Any]) -> bool:
    return "integer" in kinds and "number" not in kinds


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
    whole = _is_whole(kinds)
    if (key in _HIGH and value < -MOST) or (whole and key in _LOW and value > MOST):
        raise Refusal(f"the bound {value!r:.60} is beyond ±{MOST:,}", f"/{key}")
    exact = Decimal(repr(value))
    if abs(value) <= EXACT:
        if whole:
            return value
        places = max(DIGITS - _whole_digits(exact), 0)
        inward = ROUND_CEILING if key in _LOW else ROUND_FLOOR
        kept = exact.quantize(Decimal(1).scaleb(-places), inward)
        return value if kept == exact else float(kept)
    try:
        near = float(value)
    except OverflowError as error:
        raise Refusal("the bound is larger than any float", f"/{key}") from error
    if whole:
        near = max(-MOST, min(MOST, near))
    towards = math.inf if key in _LOW else -math.inf
    while not _within(near, exact, key in _LOW):
        near = math.nextafter(near, towards)
    return int(near) if abs(near) <= MOST else near


def _within(near: float, bound: Decimal, low: bool) -> bool:
    """Whether a float keeps a bound as the library writes it: in short, or as an integer."""
    written = [Decimal(repr(near))]
    if abs(near) <= MOST:
        written.append(Decimal(int(near)))
    return min(written) >= bound if low else max(written) <= bound

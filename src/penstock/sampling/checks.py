"""Checking one value of a request: what is wrong with it, the number, and the way out."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Final, cast

from penstock.errors import InvalidSamplingError, kind_of

HIGHEST_BIAS: Final = 100.0
HIGHEST_ID: Final = 2**31 - 1
"""Of a token: ids are int32 where they are computed with. No vocabulary ends beyond."""

_IDS: Final = "Pass token ids, not strings."


class Checked:
    """Fields of a frozen dataclass that are checked, and stored as plain values."""

    __slots__ = ()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int, high: int | None, hint: str) -> None:
        self._set(name, integer(name, getattr(self, name), low, high, hint))

    def _real(self, name: str, low: float, high: float, hint: str) -> None:
        self._set(name, real(name, getattr(self, name), low, high, hint))


def integer(name: str, value: object, low: int, high: int | None, hint: str) -> int:
    """``value`` as a plain int in [low, high]; numpy's integers pass, bools and floats don't."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidSamplingError(
            f"{name} is {value!r}, {kind_of(value)}; it must be an integer. {hint}"
        )
    number = int(value)
    if number < low or (high is not None and number > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingError(f"{name} is {number}; it must be {span}. {hint}")
    return number


def real(
    name: str, value: object, low: float, high: float, hint: str, *, above: bool = False
) -> float:
    """``value`` as a plain finite float in [low, high]; bools and strings don't pass.

    above: nor does `low` itself.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSamplingError(
            f"{name} is {value!r}, {kind_of(value)}; it must be a number. {hint}"
        )
    # Compared before converting: a huge int doesn't fit a float. NaN fails the comparison.
    number = cast("float", value)
    if not low <= number <= high or (above and number == low):
        bracket = "(" if above else "["
        raise InvalidSamplingError(
            f"{name} is {number}; it must be in {bracket}{low:g}, {high:g}]. {hint}"
        )
    return float(number)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A tuple of ids up to HIGHEST_ID; whether they exist is known once the vocabulary is."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise InvalidSamplingError(
            f"{name} is {value!r}, {kind_of(value)}. Pass a list of token ids."
        )
    return tuple(
        integer(f"{name}[{i}]", one, 0, HIGHEST_ID, "Pass token ids.")
        for i, one in enumerate(value)
    )


def bias(value: object) -> dict[int, float]:
    """``logit_bias`` as plain ints and floats."""
    if not isinstance(value, Mapping):
        raise InvalidSamplingError(
            f"logit_bias is {value!r}, {kind_of(value)}. "
            "Pass a mapping of token id to bias, such as {50256: -100}."
        )
    checked: dict[int, float] = {}
    for token, bias in value.items():
        token_id = integer("a key of logit_bias", token, 0, HIGHEST_ID, _IDS)
        hint = "To forbid or force a token use allowed_token_ids."
        checked[token_id] = real(f"logit_bias[{token_id}]", bias, -HIGHEST_BIAS, HIGHEST_BIAS, hint)
    return checked


def texts(name: str, value: object) -> tuple[str, ...]:
    """``stop`` or ``bad_words`` as a tuple: a single string stands for a list of one."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidSamplingError(
            f"{name} is {value!r}, {kind_of(value)}. Pass a string or a list of strings."
        )
    for i, one in enumerate(value):
        if not isinstance(one, str):
            raise InvalidSamplingError(
                f"{name}[{i}] is {one!r}, {kind_of(one)}. Pass strings here, and ids in "
                "stop_token_ids or logit_bias."
            )
        if not one:
            raise InvalidSamplingError(
                f"{name}[{i}] is an empty string, which is everywhere. Leave it out."
            )
        _check_unicode(f"{name}[{i}]", one)
    return tuple(value)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidSamplingError(
            f"{name} has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start} of {len(text)}, which no output can hold. Leave it out."
        ) from error

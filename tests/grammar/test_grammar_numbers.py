"""Numbers of schemas: bounds, and values that the library can't hold as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from tests.grammar.test_grammar_gbnf import written

from penstock.errors import InvalidSamplingError
from penstock.grammar import Grammars
from penstock.sampling.structured import StructuredOutputs

NUMBERS: dict[str, tuple[Any, str]] = {
    "const": ({"const": 1234567890123456789}, "at #/const: the number 1234567890123456789 can't"),
    "within": ({"properties": {"a": {"enum": [{"b": [2**53 + 1]}]}}}, "at #/properties/a/enum"),
    "lowest": ({"const": -(2**63)}, "at #/const"),  # which ended the process
    "low": ({"type": "integer", "enum": [-1e30]}, "at #/enum"),
    "bound": ({"minimum": -1e31, "maximum": -1e30}, r"at #/maximum: the bound -1e\+30 is beyond"),
    "too near a fraction": (
        {"minimum": 1e-20, "maximum": 2e-20},
        "at #/minimum: between 1e-20 and 2e-20 lies no number",
    ),
    "too near": (
        {"type": "integer", "minimum": 1234567890123456789, "maximum": 1234567890123456799},
        "at #/minimum: between 1234567890123456789 and 1234567890123456799 lies no number",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_cant_be_held_are_refused(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    schema, message = NUMBERS[name]
    with pytest.raises(InvalidSamplingError, match=message):
        grammars_of("gpt2").compile(StructuredOutputs(json=schema))
    lark = StructuredOutputs(grammar=f'start: a\na: %json {{"const": {-(2**63)}}}\n')
    with pytest.raises(InvalidSamplingError, match="at line 2: the number -9223372036854775808 is"):
        grammars_of("gpt2").compile(lark)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_floats_are_kept(kind: str, grammars_of: Callable[[str], Grammars]) -> None:
    schema = {"type": kind, "minimum": 2**53 + 1, "maximum": 1234567890123999999}
    for value, follows in (
        (2**53, False), (2**53 + 1, False), (2**53 + 2, True), (1234567890123400000, True),
        (1234567890124000000, False),
    ):  # fmt: skip
        spec = StructuredOutputs(json=schema)
        assert written(grammars_of("gpt2"), spec, str(value)) == follows, value
    wide = StructuredOutputs(json={"type": kind, "minimum": -(2**63), "maximum": 2**63 - 1})
    assert written(grammars_of("gpt2"), wide, "-5")
    exact = StructuredOutputs(json={"enum": [10**22, 2**53]})
    assert written(grammars_of("gpt2"), exact, str(10**22))


EXCLUDED = [
    (0, 0.5), (0, 0.001), (1, 1.5), (9, 9.5), (99, 99.5), (12345, 12345.25), (-3, -2.5),
    (-0.5, 0), (-1.5, -1), (-100.5, -100), (-0.5, 0.5), (0, 1), (2, 4), (99.00000000000001, 99.5),
]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), EXCLUDED)
def test_numbers_keep_bounds_of_any_kind(
    low: float, high: float, grammars_of: Callable[[str], Grammars]
) -> None:
    """The library takes integers at the end for allowed where they are excluded."""
    ends = {low, high, int(low), int(high)}
    texts = {
        f"{end}{more}" for end in ends for more in ("", ".0", "5", ".25") if "e" not in str(end)
    }
    texts = {text for text in texts if text.count(".") < 2} | {"-0", "0", "0.0004", "-0.25"}
    for below, above in itertools.product(
        ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ):
        for schema in ({below: low, above: high}, {"allOf": [{below: low}, {above: high}]}):
            spec = StructuredOutputs(json={"type": "number", **schema})
            for text in texts:
                value = Decimal(text)
                above_low = value > Decimal(str(low)) or (
                    value == Decimal(str(low)) and below == "minimum"
                )
                below_high = value < Decimal(str(high)) or (
                    value == Decimal(str(high)) and above == "maximum"
                )
                if written(grammars_of("gpt2"), spec, text):
                    assert above_low and below_high, (schema, text)
            between = str((Decimal(str(low)) + Decimal(str(high))) / 2)
            assert written(grammars_of("gpt2"), spec, between), schema


def test_excluded_integers_of_integers(grammars_of: Callable[[str], Grammars]) -> None:
    for schema in (
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 5},
        {"allOf": [{"type": "integer"}, {"exclusiveMinimum": 2}, {"exclusiveMaximum": 5}]},
        {"type": ["integer", "string"], "minimum": 1, "exclusiveMinimum": 2, "exclusiveMaximum": 5},
    ):
        spec = StructuredOutputs(json=schema)
        found = [x for x in range(8) if written(grammars_of("gpt2"), spec, str(x))]
        assert found == [3, 4], schema

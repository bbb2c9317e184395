"""Which cases of a test the quick suite runs."""

from __future__ import annotations

import json

from tests.quick import DURATIONS, ENOUGH_S, TOO_LONG_S, chosen, function_of

CASES = [f"tests/a/test_b.py::test_c[{i}]" for i in range(20)]
OTHERS = [f"tests/a/test_b.py::test_d[{i}]" for i in range(20)]


def test_as_many_as_take_two_seconds() -> None:
    assert chosen(CASES, 0.0, marked=False) == set(CASES)
    assert len(chosen(CASES, 0.25, marked=False)) == 8
    assert len(chosen(CASES, 4.0, marked=False)) == 1
    assert chosen(CASES, 0.25, marked=False) == chosen(CASES[::-1], 0.25, marked=False)


def test_what_takes_long_by_itself_is_left_out_unless_it_is_marked() -> None:
    assert chosen(CASES, TOO_LONG_S + 1, marked=False) == set()
    assert len(chosen(CASES, TOO_LONG_S + 1, marked=True)) == 1


def test_tests_leave_out_different_cases() -> None:
    kept = [
        {name.split("[")[1] for name in chosen(cases, 0.25, marked=False)}
        for cases in (CASES, OTHERS)
    ]
    assert kept[0] != kept[1]


def test_what_is_written_down_takes_longer_than_enough() -> None:
    """And no case is: all cases of a test are chosen by one number."""
    seconds = json.loads(DURATIONS.read_text())
    assert seconds == {function_of(name): found for name, found in seconds.items()}
    assert all(found > 0 for found in seconds.values()) and ENOUGH_S < TOO_LONG_S

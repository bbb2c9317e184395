"""Which cases of a test the quick suite runs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.quick import DURATIONS, TOO_LONG_S, chosen, selection, updated

CASES = [f"tests/a/test_b.py::test_c[{i}]" for i in range(20)]
OTHERS = [f"tests/a/test_b.py::test_d[{i}]" for i in range(20)]
NAME, OTHER = "tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d"


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


def test_no_file_is_left_out() -> None:
    """Of one whose tests all take long, the shortest runs."""
    seconds = {NAME: 30.0, OTHER: 20.0}
    kept = selection({NAME: CASES, OTHER: OTHERS}, seconds, set())
    assert len(kept) == 1 and kept < set(OTHERS)
    assert selection({NAME: CASES, OTHER: OTHERS}, {NAME: 30.0}, set()) == set(OTHERS)
    kept = selection({NAME: CASES, OTHER: OTHERS}, seconds, {NAME})
    assert len(kept) == 1 and kept < set(CASES)


def test_what_is_written_down(tmp_path: Path) -> None:
    """What ran anew, what didn't as it was; of files that are gone nothing."""
    (tmp_path / "tests/a").mkdir(parents=True)
    (tmp_path / "tests/a/test_b.py").touch()
    before = {NAME: 9.0, OTHER: 3.0, "tests/gone.py::test_e": 4.0}
    assert updated(before, {}, tmp_path) == {NAME: 9.0, OTHER: 3.0}
    assert updated(before, {OTHER: [1.0, 2.0]}, tmp_path) == {NAME: 9.0, OTHER: 1.5}
    assert updated(before, {NAME: [0.5, 0.5]}, tmp_path) == {OTHER: 3.0}


def test_the_file_is_of_tests_that_are_there() -> None:
    root = DURATIONS.parents[1]
    for name, seconds in json.loads(DURATIONS.read_text()).items():
        assert (root / name.split("::")[0]).is_file() and seconds > 0

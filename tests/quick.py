"""The quick suite: of every test, as many cases as take two seconds.

Most of the suite's hour goes into products: each family, format or method, once more for each way
to run it. `make test` runs a share of each product, chosen by names, so that every test leaves out
others and the same ones on any machine. `make test-all` runs all, and writes down which tests take
long. What isn't written down runs whole: a new test always does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
"""Test → seconds that one of its cases takes, of those that take longer than ENOUGH_S together."""

ENOUGH_S = 2.0
"""For all cases of one test, unless one alone takes longer."""

TOO_LONG_S = 5.0
"""For a single case: the quick suite has none of these, but where `quick` marks them."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock")
    group.addoption("--quick", action="store_true", help="as many cases as take two seconds a test")
    group.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name}")


def function_of(nodeid: str) -> str:
    """The test of which this is a case."""
    return nodeid.split("[", 1)[0]


def chosen(cases: list[str], seconds: float, marked: bool) -> set[str]:
    """The cases of one test that the quick suite runs; of other tests, other ones."""
    if seconds > TOO_LONG_S and not marked:
        return set()
    most = max(1, int(ENOUGH_S / seconds)) if seconds else len(cases)
    return set(sorted(cases, key=lambda case: sha256(case.encode()).digest())[:most])


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what isn't of the quick suite out of `items`."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text())
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[function_of(item.nodeid)].append(item)
    kept: set[str] = set()
    for name, of_one in cases.items():
        marked = any(item.get_closest_marker("quick") for item in of_one)
        kept |= chosen([item.nodeid for item in of_one], seconds.get(name, 0.0), marked)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


class Durations:
    """Collects how long tests take, and writes DURATIONS at the end of a run of all of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._seconds[function_of(report.nodeid)].append(report.duration)

    def pytest_sessionfinish(self) -> None:
        long = {
            name: round(sum(found) / len(found), 2)
            for name, found in sorted(self._seconds.items())
            if sum(found) > ENOUGH_S
        }
        DURATIONS.write_text(json.dumps(long, indent=1) + "\n")

"""The quick suite: of every test, as many cases as take two seconds.

Most of the suite's hour goes into products: each family, format or method, once more for each way
to run it. `make test` runs a share of each product, chosen by names, so that tests leave out
different cases, and the same ones on any machine. A test whose single case takes longer than five
seconds isn't part of it, unless it is marked `quick`, or its file would have none. `make test-all`
runs all of them. Which take long is written down (`make durations`); what isn't, runs whole: a new
test always does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
"""Test → seconds that one of its cases takes, of those that take longer than ENOUGH_S together."""

ENOUGH_S = 2.0
"""For all cases of one test, unless one alone takes longer."""

TOO_LONG_S = 5.0
"""For a single case."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock")
    group.addoption("--quick", action="store_true", help="only what `make test` runs")
    group.addoption(
        "--write-durations",
        action="store_true",
        help=f"bring {DURATIONS.name} up to date, at the end of a run in which nothing failed",
    )


def function_of(nodeid: str) -> str:
    """The test of which this is a case."""
    return nodeid.split("[", 1)[0]


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def chosen(cases: list[str], seconds: float, marked: bool) -> set[str]:
    """The cases of one test that the quick suite runs; of other tests, other ones."""
    if seconds > TOO_LONG_S and not marked:
        return set()
    most = max(1, int(ENOUGH_S / seconds)) if seconds else len(cases)
    return set(sorted(cases, key=lambda case: sha256(case.encode()).digest())[:most])


def selection(
    cases: Mapping[str, list[str]], seconds: Mapping[str, float], marked: set[str]
) -> set[str]:
    """The cases that the quick suite runs. cases: of each test. marked: tests with `quick`."""
    kept: set[str] = set()
    for name, own in cases.items():
        kept |= chosen(own, seconds.get(name, 0.0), name in marked)
    left = {file_of(name) for name in cases} - {file_of(case) for case in kept}
    for file in left:
        shortest = min((n for n in cases if file_of(n) == file), key=lambda n: seconds[n])
        kept |= chosen(cases[shortest], seconds[shortest], marked=True)
    return kept


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what isn't of the quick suite out of `items`."""
    cases: dict[str, list[str]] = defaultdict(list)
    marked: set[str] = set()
    for item in items:
        cases[function_of(item.nodeid)].append(item.nodeid)
        if item.get_closest_marker("quick"):
            marked.add(function_of(item.nodeid))
    kept = selection(cases, json.loads(DURATIONS.read_text()), marked)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def updated(
    before: Mapping[str, float], found: Mapping[str, list[float]], root: Path
) -> dict[str, float]:
    """What is to be written down: of tests that didn't run what there was, where their file is."""
    kept = {
        name: seconds
        for name, seconds in before.items()
        if name not in found and (root / file_of(name)).is_file()
    }
    measured = {name: sum(s) / len(s) for name, s in found.items() if sum(s) > ENOUGH_S}
    return {name: round(seconds, 3) for name, seconds in sorted((kept | measured).items())}


class Durations:
    """Collects how long tests take, and writes it down where none failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._seconds[function_of(report.nodeid)].append(report.duration)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self._seconds:
            found = updated(json.loads(DURATIONS.read_text()), self._seconds, self._root)
            DURATIONS.write_text(json.dumps(found, indent=1) + "\n")

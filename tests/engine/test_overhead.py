"""`benchmarks/engine_overhead.py` runs, and what it adds up is the whole step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks/engine_overhead.py"


@pytest.mark.skipif(not FILE.exists(), reason="an installation without benchmarks")
@pytest.mark.parametrize(("stream", "sampled"), [(False, False), (True, True)])
def test_the_parts_of_a_step(stream: bool, sampled: bool) -> None:
    spec = importlib.util.spec_from_file_location("engine_overhead", FILE)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    rows = bench.measure(8, 64, 3 * bench.WINDOW, None, stream=stream, sampled=sampled)
    assert list(rows) == [*bench.CAUSES, "step"]
    assert all(0 < best <= median for median, best in rows.values())
    assert sum(rows[cause][1] for cause in bench.CAUSES) <= rows["step"][0]

"""`benchmarks/preemption.py` runs, and all modes give the same tokens."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from .test_soak import tiny_runtime

FILE = Path(__file__).resolve().parents[2] / "benchmarks/preemption.py"


@pytest.mark.skipif(not FILE.exists(), reason="an installation without benchmarks")
@pytest.mark.parametrize("caching", [True, False])
def test_the_modes_agree(caching: bool, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("preemption_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    options = Namespace(requests=20, prompt=30, tokens=60, seqs=8, budget=40, warm_up=2)
    runtime = tiny_runtime()
    rows, outputs = zip(
        *(bench.run(runtime, options, mode, caching, None) for mode in bench.MODES), strict=True
    )
    assert outputs[0] == outputs[1] == outputs[2]
    for row, mode in zip(rows[:2], bench.MODES, strict=False):
        assert row[f"preemptions_{mode}"] > 2
        assert row[mode]["count"] + row[mode]["free"] == row[f"preemptions_{mode}"] - 2
    assert rows[1]["swap"]["median_error"] >= 0
    bench.show(list(rows))
    assert len(capsys.readouterr().out.splitlines()) >= 4

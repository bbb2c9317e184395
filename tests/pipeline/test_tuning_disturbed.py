"""On a machine that others use, timing ends early and chooses nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.pipeline import tuning
from penstock.pipeline.build import BuildOptions, build
from tests.pipeline.conftest import needs_native


@needs_native
def test_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "waited_s", time.process_time)  # as much waiting as work
    monkeypatch.setattr(tuning, "_TRIAL_S", 0.0)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        options = BuildOptions(
            model="stories", output=tmp_path / name, profile=(1, 8, 64), max_num_seqs=8
        )
        report = build(options)
        assert report["disturbed"] and report["timings"] == "measured"  # never replayed
        assert report["chosen"] == {"threads": (), "prefill_tokens": None, "variants": ()}
    kept = tuning.Timings((tuning.Timing(1, 1, 1.0),), 1.0)
    assert tuning.choose(kept, (1, 8, 64)).prefill_tokens is None

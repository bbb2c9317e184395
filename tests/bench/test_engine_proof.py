"""`benchmarks/engine_proof.py`: what it finds of a small model, and that it can fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.pipeline.conftest import needs_native

from penstock.errors import PenstockError

Script = Callable[[str], ModuleType]
pytestmark = needs_native


def test_a_form_is_proved(benchmark: Script, tiny: Path, tmp_path: Path) -> None:
    proof = benchmark("engine_proof")
    found = proof.prove(tiny, proof.Form("w4a8", "kivi"), tmp_path)
    assert proof.holds(found)
    assert (found["formats"], found["stored"]) == ("w4a8-g32, w8a8 head", "kivi")
    assert found["build_peak_bytes"] > found["weights_bytes"] > 0


def test_what_differs_or_fails_ends_with_1(
    benchmark: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    proof = benchmark("engine_proof")
    fine = {
        "graph_equal": True, "engine_equal": True, "sound": True, "compiled": 0,
        "weights_bytes": 1, "operators": 1, "build_peak_bytes": 1,
    }  # fmt: skip
    rows = {
        None: fine, "w8a8": {**fine, "engine_equal": False}, "fp8": {**fine, "compiled": 1},
        "nf4": {**fine, "sound": False},
    }  # fmt: skip

    def prove(model: Path, form: Any, folder: Path) -> Any:
        if form.weights not in rows:
            raise PenstockError("no such form")
        return rows[form.weights]

    monkeypatch.setattr(proof, "prove", prove)
    monkeypatch.setattr(proof, "FORMS", [proof.Form(name) for name in (*rows, "w9a9")])
    results = tmp_path / "r.json"
    monkeypatch.setattr(sys, "argv", ["engine_proof.py", "model", "--json", str(results)])
    assert proof.main() == 1
    found = json.loads(results.read_text())["results"]
    assert [proof.holds(row) for row in found] == [True, False, False, False, False]
    assert "no such form" in found[4]["error"]
    assert "1 of 5 forms hold" in capsys.readouterr().out
    monkeypatch.setattr(proof, "FORMS", [proof.Form()])
    assert proof.main() == 0

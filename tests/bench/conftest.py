"""A tiny checkpoint, made by the script that the benchmarks use."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def make_checkpoint() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_checkpoint", ROOT / "benchmarks" / "make_checkpoint.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny(make_checkpoint: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint.write_checkpoint("tiny", folder)
    return folder


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of benchmarks/ by its name; they import each other by theirs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module

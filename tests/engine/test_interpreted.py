"""Whole engines over Triton's kernels in its interpreter: `tests/interpreted`, in a process whose
kernels they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [f"tests/interpreted/test_{name}.py" for name in ("engine", "families", "speculation")]


@pytest.mark.slow
def test_engines_whose_kernels_are_compiled() -> None:
    """Every family, format, cache and method gets as far as a GPU: 2 minutes."""
    pytest.importorskip("triton", reason="Triton isn't installed")
    from tests.kernels.triton.compiled import in_fresh_process

    in_fresh_process("tests.interpreted.compiled_engine")


@pytest.mark.quick
def test_over_tritons_kernels(request: pytest.FixtureRequest) -> None:
    run_interpreted("not slow", *["--quick"] * request.config.getoption("--quick"))


@pytest.mark.slow
def test_in_further_ways() -> None:
    run_interpreted("slow")


def run_interpreted(which: str, *options: str) -> None:
    """In one process: each imports torch and transformers and starts Triton."""
    pytest.importorskip("triton", reason="Triton isn't installed")
    environment = os.environ | {"PENSTOCK_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    environment.pop("PENSTOCK_ISA", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = subprocess.run(
        [*command, "-m", which, *options, *FILES],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout

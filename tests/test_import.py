"""What importing the package does to the process that it is imported into."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("name", ["LLM", "PenstockError", "Nothing"])
def test_garbage_is_collected_as_before(collects: bool, name: str) -> None:
    """Also where the import fails."""
    lines = f"""
import gc, sys
{"gc.enable" if collects else "gc.disable"}()
before = gc.get_threshold(), gc.get_freeze_count()
try:
    from penstock import {name}
except ImportError as error:
    print(error)
assert gc.isenabled() is {collects} and (gc.get_threshold(), gc.get_freeze_count()) == before
print("torch" in sys.modules)
"""
    line = [sys.executable, "-c", lines]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(name == "LLM")
    assert ("cannot import name" in done.stdout) is (name == "Nothing")


@pytest.mark.parametrize("frozen", [True, False])
def test_modules_are_not_looked_through_again(frozen: bool) -> None:
    """They are among the oldest at once, and what a caller has frozen stays frozen."""
    lines = f"""
import gc
if {frozen}:
    gc.freeze()
before = gc.get_freeze_count()
from penstock import LLM
young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
now = gc.get_freeze_count()  # some go by themselves
assert before // 2 <= now <= before and (now > 0) is {frozen}, (now, before)
print(young, len(gc.get_objects(generation=2)))
"""
    line = [sys.executable, "-c", lines]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    young, old = map(int, done.stdout.split())
    assert frozen or (young < 5_000 and old > 50_000)

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

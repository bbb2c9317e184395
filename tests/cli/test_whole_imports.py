"""Ctrl-C while modules are imported: libraries that swallow it can't, and no traceback is shown."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIBRARY = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except BaseException:
    print("interrupted")
print("whole", __spec__.loader is __loader__)
"""

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from penstock.cli.whole import import_whole
import_whole()
import_whole()
try:
    import numpy
except KeyboardInterrupt:
    print("then", type(sys.meta_path[0]).__name__, type(sys.meta_path[1]).__name__)
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_library_ends_its_import(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(LIBRARY)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole, then, default = done.stdout.splitlines()
    assert (whole, default) == ("whole True", "True")
    assert then.startswith("then _Finder ")
    assert then != "then _Finder _Finder"


@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.8, 1.1, 1.4])
def test_at_any_moment(seconds: float) -> None:
    """Whatever is being done by then, which depends on the machine."""
    code = "print('begun', flush=True); from penstock.__main__ import run; run()"
    command = [sys.executable, "-c", code, "bench", "latency", "stories", "--repeats", "100"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said.decode()
    assert said.decode().splitlines()[-1] == "Stopped."
    assert "Traceback" not in said.decode()

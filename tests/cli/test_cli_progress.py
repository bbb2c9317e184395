"""The line that tells how far a command is: rewritten on a terminal, nothing elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import console
from penstock.cli.progress import progress_line

Process = Callable[..., "subprocess.Popen[bytes]"]


def shown(text: str) -> list[str]:
    """What stood on the line, one after the other."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\r", text)
    return [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("_terminal")
def test_steps_one_after_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    with progress_line() as show:
        show("reading", 0, 0)
        for done in (2, 3, 4):  # the two before were there already
            show("quantizing", done, 12)
            clock[0] += 60.0
    last = " ".join(shown(capsys.readouterr().err))
    assert "quantizing 4/12" in last
    assert "0:08:00" in last  # eight left, a minute each: what was there doesn't count
    assert last.count("left") >= 1


def test_nothing_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_line() as show:
        show("quantizing", 1, 2)
    assert capsys.readouterr().err == ""


def test_an_export_on_a_terminal(process: Process, base_model: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    running = process(
        "export", base_model, "-o", tmp_path / "out", "--quant", "w8a16", stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end has closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert running.stdout is not None
    out = running.stdout.read()
    assert running.wait() == 0 and b"graph of" in out
    lines = shown(seen.decode())
    assert any(line.startswith("graph") for line in lines)
    assert seen.count(b"\n") <= 2  # rewritten, not scrolled
    assert seen.endswith(b"\x1b[2K")  # and taken away at the end

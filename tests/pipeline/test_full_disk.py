"""A disk that fills up in the middle: a clear error, and no folder left that loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.stories import shallow

FULL = Path(__file__).with_name("full_disk.py")


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.multiprocess
@pytest.mark.skipif(not _can_mount(), reason="no user namespace that may mount a tmpfs")
def test_small_disks(tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "disk"
    text.write_text("Once upon a time, there was a little girl who had a red ball. " * 40)
    folder.mkdir()
    model = shallow(tmp_path / "model")
    environment = {**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, str(FULL), str(folder), str(text), str(model)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(attempts) == 13
    for found in attempts:
        if found["what"] == "resumed":
            assert found["ended"] == "done" and found["left"] == ["out"]
            continue
        assert found["ended"].startswith("EngineFolderError: The disk filled up while "), found
        assert "are free now. Free more" in found["ended"]
        work = ["out.work"] if found["what"] == "fitted" else []
        assert found["left"] in ([], work), found

"""`benchmarks/start.py`: processes that begin from nothing."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from benchmarks import start

from penstock.models.hub import resolve


@pytest.mark.multiprocess
def test_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked, once = tmp_path / "start.json", list[str](), cache(start.once)

    def remembered(model: Path, form: str) -> dict[str, float]:
        asked.append(form)
        return once(model, form)

    monkeypatch.setattr(start, "once", remembered)
    model = str(resolve("stories"))
    start.main([model, "--formats", "w8a8", "default", "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())["found"]
    assert list(found) == ["w8a8", "default"]
    assert asked == ["w8a8", "default"] * 2  # before what counts each has run
    found = found["w8a8"]
    assert list(found) == [*start.PARTS, "wall_s", "least_total_s"]
    parts = [found[name] for name in start.PARTS]
    assert all(part > 0 for part in parts)
    assert sum(parts[:-1]) == pytest.approx(parts[-1])
    assert found["wall_s"] > found["total_s"] == found["least_total_s"]
    assert "w8a8" in capsys.readouterr().out


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        start.main([str(tmp_path)])
    with pytest.raises(SystemExit):
        start.main([str(resolve("stories")), "--rounds", "0"])
    with pytest.raises(RuntimeError, match="w9a9"):
        start.once(Path(str(resolve("stories"))), "w9a9")

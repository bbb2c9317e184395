"""What ships: every member's files, under the package's names, within its budget."""

import json
from pathlib import Path

import pytest
from recipes.ship import NAMES, files_of, ship

from penstock.errors import ConfigError
from recipes import ship as module


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder as training and evaluation leave it, ten bytes a file."""
    for member in NAMES:
        folder = tmp_path / "work" / member
        folder.mkdir(parents=True)
        for name in (*files_of(member), "log.jsonl"):
            (folder / name).write_text('{"a": 11}\n')
    return tmp_path / "work"


def test_members_replace_what_was_there(work: Path, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    (assets / "stories").mkdir(parents=True)
    (assets / "stories" / "old").touch()
    (assets / "stories-eagle").mkdir()
    table = ship(work, assets)
    assert {p.name for p in assets.iterdir()} == {*NAMES.values(), "stories-eagle"}
    for member, name in NAMES.items():
        assert {p.name for p in (assets / name).iterdir()} == set(files_of(member))
        assert f"| {member} | {name} | 0.0 |" in table
    adapter = json.loads((assets / "stories-shakespeare" / "adapter_config.json").read_text())
    assert adapter == {"a": 11, "base_model_name_or_path": "stories"}


def test_nothing_is_copied_when_something_is_missing(work: Path, tmp_path: Path) -> None:
    (work / "draft" / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"1 files are missing, .*draft/README\.md first"):
        ship(work, tmp_path / "assets")
    assert not (tmp_path / "assets").exists()


def test_a_family_that_is_too_large_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 250)
    with pytest.raises(ConfigError, match=r"The family takes 0\.0 MB, and 0 MB may ship"):
        ship(work, tmp_path / "assets")
    assert not (tmp_path / "assets").exists()

"""A folder that is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.pipeline import new_folder as module
from penstock.pipeline.new_folder import check_apart, named, new_folder


def ours(folder: Path) -> frozenset[str] | None:
    return frozenset({"mark"}) if (folder / "mark").exists() else None


def make(target: Path, text: str, force: bool = False) -> None:
    with new_folder(target, force=force, own_files=ours) as folder:
        (folder / "mark").write_text(text)


def test_two_at_once(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", force=False, own_files=ours) as folder:
        (folder / "mark").write_text("")
        with pytest.raises(ConfigError, match=r"Another process is writing .*out now"):
            make(tmp_path / "out", "second")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_model_and_what_is_made_of_it_lie_apart(tmp_path: Path) -> None:
    model = tmp_path / "models" / "whole"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    for output, words in (
        (model, "is the model itself"),
        (tmp_path / "link", "is the model itself"),
        (model / ".." / "whole", "is the model itself"),
        (model / "deep" / "out", "lies inside the model's own folder"),
        (tmp_path / "link" / "out", "lies inside the model's own folder"),
        (tmp_path / "models", "The model, .*, lies inside .*, which would be replaced"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_apart(model, output)
    check_apart(model, tmp_path / "models" / "whole-w4a16")
    check_apart(model, tmp_path / "out")


def test_a_name_that_never_loads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out\.partial ends in \.partial"):
        make(tmp_path / "out.partial", "new")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "out.partial" / "deep").mkdir(parents=True)
    (tmp_path / "out.partial" / "stale").write_text("")
    make(tmp_path / "out", "new")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mark"]


def test_killed_between_two_renames(tmp_path: Path) -> None:
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "mark").write_text("old")
    with pytest.raises(ConfigError, match="exists"):
        make(tmp_path / "out", "new")
    assert (tmp_path / "out" / "mark").read_text() == "old"


@pytest.mark.parametrize("swaps", [True, False])
def test_a_copy_that_somebody_keeps_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    make(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / "out.old")
    make(tmp_path / "out", "new")
    make(tmp_path / "out", "newer", force=True)
    assert (tmp_path / "out" / "mark").read_text() == "newer"
    assert (tmp_path / "out.old" / "mark").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old"]


@pytest.mark.parametrize("swaps", [True, False])
def test_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    if not swaps:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    make(tmp_path / "out", "old")
    make(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "mark").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")

    def fail() -> None:
        with new_folder(tmp_path / "out", force=True, own_files=ours) as folder:
            (folder / "none" / "file").write_text("")

    with pytest.raises(ConfigError, match=r"out can't be written: No such file or directory"):
        fail()
    assert (tmp_path / "out" / "mark").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_link_stays_one_and_what_it_leads_to_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "out").symlink_to("disk/v1")  # which isn't there yet
    for text in ("first", "second", "third"):
        make(tmp_path / "out", text, force=True)
        assert (tmp_path / "out").is_symlink()
        assert (disk / "v1" / "mark").read_text() == text
        assert [p.name for p in disk.iterdir()] == ["v1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "out"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"loop is a link that leads nowhere"):
        make(tmp_path / "loop", "new")
    (tmp_path / "late").symlink_to(tmp_path / "out.partial")
    with pytest.raises(ConfigError, match=r"out\.partial ends in \.partial"):
        make(tmp_path / "late", "new")


def test_a_link_or_a_file_in_the_place_of_what_is_written(tmp_path: Path) -> None:
    """As a link that was swapped away by an earlier version."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mark").write_text("kept")
    (tmp_path / "out.partial").symlink_to(tmp_path / "kept")
    make(tmp_path / "out", "one")
    (tmp_path / "out.partial").write_text("a file")
    make(tmp_path / "out", "two", force=True)
    assert (tmp_path / "out" / "mark").read_text() == "two"
    assert (tmp_path / "kept" / "mark").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out"]


def test_what_a_killed_one_left_can_not_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "out.partial").mkdir()
    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    with pytest.raises(ConfigError, match=r"out can't be written: Permission denied"):
        make(tmp_path / "out", "new")


def test_what_was_there_can_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new folder is in its place: that is no failure."""
    make(tmp_path / "out", "old")
    monkeypatch.setattr(module, "_clear", lambda path: None)
    make(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "mark").read_text() == "new"
    assert "out.partial is what was there before: it can't be removed" in caplog.text


def test_folders_without_a_name_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "deep")
    assert named(Path()) == tmp_path / "out" / "deep"
    assert named(Path("..")) == tmp_path / "out"
    (tmp_path / "out" / "mark").write_text("old")
    make(Path(".."), "new", force=True)
    assert (tmp_path / "out" / "mark").read_text() == "new"
    with pytest.raises(ConfigError, match="/ is the root of all folders"):
        make(Path("/"), "new", force=True)

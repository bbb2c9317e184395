"""A folder that is there whole or not at all.

It is written as `<name>.partial` beside its place and renamed when every file has reached the disk.
A process that is killed leaves the partial folder, which the next one clears.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError

OURS = ("penstock.json", "engine.json")
"""Manifests of folders that may be replaced: Penstock has written them."""


@contextmanager
def writing(output: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when the block ends without an error.

    force: an earlier folder of ours at `output` is replaced.
    Raises ConfigError when `output` is taken, can't be written, or another process writes it.
    """
    output = Path(os.path.abspath(output))  # `..` and links as they are named
    partial = output.with_name(output.name + ".partial")
    old = output.with_name(output.name + ".replaced")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if old.exists() and not output.exists():  # killed between two renames
            old.rename(output)
        _check_free(output, force)
        lock = _claim(partial)
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {_reason(error)}.") from error
    try:
        _clear(partial)
        yield partial
        for file in sorted(partial.rglob("*"), reverse=True):
            _sync(file)
        _sync(partial)
        _put_in_place(partial, output, old)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(output.parent).free
        raise ConfigError(
            f"Writing {output} failed: {_reason(error)} ({free / 1e9:,.1f} GB are free there). "
            "Nothing of it is left; give another place, or make room."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _check_free(output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{output} is a file. Give the name of a folder.")
    if not any(output.iterdir()):
        return
    if not any((output / name).exists() for name in OURS):
        raise ConfigError(
            f"{output} holds files that Penstock didn't write. Give another folder, or delete it."
        )
    if not force:
        raise ConfigError(f"{output} exists. Give another folder, or replace it by --force.")


def _claim(partial: Path) -> int:
    """A descriptor that holds the lock of `partial`."""
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(lock), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:  # held by another, or just put in its place by another
        os.close(lock)
        raise ConfigError(
            f"Another process is writing {partial}. Wait for it, or give another folder."
        )
    return lock


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _put_in_place(partial: Path, output: Path, old: Path) -> None:
    if old.exists():
        shutil.rmtree(old)
    if output.exists():
        output.rename(old)
    partial.rename(output)
    _sync(output.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return (error.strerror or str(error)) + where

"""A folder that is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError, EngineFolderError, PenstockError
from penstock.runtime.engine_folder import PARTIAL

logger = logging.getLogger("penstock")

OwnFiles = Callable[[Path], frozenset[str] | None]
"""The files that belong to a folder of one kind, relative to it; None: it isn't of this kind."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_folder(target: Path, *, force: bool, own_files: OwnFiles) -> Iterator[Path]:
    """Yields the folder to write into: `target` with `.partial`; its end makes it `target`.

    A `.partial` that an interrupted process has left is removed first. What is at `target` is
    replaced in one step, with `force` only, and only where it holds nothing but its `own_files`.
    Where `target` is a link, the folder that it leads to is written.
    Raises ConfigError before anything is written where that can't be, or where another process
    writes the same folder; any error in between removes what was written. A full disk is an
    EngineFolderError, another failure to write a ConfigError.
    """
    target = _followed(named(target))
    if not target.parent.is_dir():
        raise ConfigError(f"There is no folder {target.parent} to make {target.name} in.")
    partial, old = target.with_name(target.name + PARTIAL), _old(target)
    with _lock(target):
        try:
            if target.exists():
                _clear(old)
            elif old.exists():  # killed between two renames
                old.rename(target)
            _check_target(target, force, own_files)
            _remove(partial)
            partial.mkdir()
            yield partial
            _sync_all(partial)
            _put(partial, target)
        except (OSError, PenstockError) as error:
            _clear(partial)
            failed = error if isinstance(error, OSError) else error.__cause__
            if isinstance(failed, OSError) and failed.errno in _FULL:
                free = shutil.disk_usage(target.parent).free
                raise EngineFolderError(
                    f"The disk filled up while {target} was written, and {partial.name} was "
                    f"removed: {free / 1e6:,.0f} MB are free now. Free more, or choose another "
                    "place."
                ) from error
            if isinstance(error, PenstockError):
                raise
            where = f" ({error.filename})" if error.filename else ""
            raise ConfigError(
                f"{target} can't be written: {error.strerror or error}{where}."
            ) from error
        except BaseException:
            _clear(partial)
            raise


def named(target: Path) -> Path:
    """`target` from the root on, with a name: `.` and `..` have none that others can lie beside.

    Raises ConfigError for the root itself.
    """
    target = target.absolute()
    if target.name in ("", ".."):
        target = target.resolve()
    if not target.name:
        raise ConfigError(f"{target} is the root of all folders. Give the name of a folder in it.")
    return target


def check_apart(model: Path, output: Path) -> None:
    """Raises ConfigError where `output` is the model's folder, lies in it, or holds the model."""
    one, other = model.resolve(), output.resolve()
    if one == other:
        raise ConfigError(f"{output} is the model itself. Choose another folder for the output.")
    if one in other.parents:
        raise ConfigError(
            f"{output} lies inside the model's own folder, {model}. Choose one outside of it."
        )
    if other in one.parents:
        raise ConfigError(
            f"The model, {model}, lies inside {output}, which would be replaced. Choose another "
            "folder for the output."
        )


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def _followed(target: Path) -> Path:
    """Where a link leads, else `target` itself: links are left as they are.

    Raises ConfigError for a name that stands for what is still being written.
    """
    try:
        found = target.resolve() if target.is_symlink() else target
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise ConfigError(f"{target} is a link that leads nowhere: {error}.") from error
    for name in (target.name, found.name):
        if name.endswith(PARTIAL):
            raise ConfigError(
                f"{name} ends in {PARTIAL}, which marks what is still being written and never "
                "loads. Choose another name."
            )
    return named(found)


def _check_target(target: Path, force: bool, own_files: OwnFiles) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file. Give the name of a folder.")
    own = own_files(target)
    if own is None:
        raise ConfigError(
            f"{target} holds files that Penstock didn't write, or not by this command. Choose "
            "another name, or delete it."
        )
    files = (path for path in target.rglob("*") if path.is_symlink() or not path.is_dir())
    others = sorted({path.relative_to(target).as_posix() for path in files} - own)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ConfigError(
            f"{target} holds {others[0]}{more}, which wasn't written with it. Move what is yours "
            "elsewhere, or choose another name."
        )
    if not force:
        raise ConfigError(f"{target} exists. Give --force to replace it, or choose another name.")


def _old(target: Path) -> Path:
    """Where what is replaced lies for a moment, where two names can't be swapped.

    No name that somebody gives to a folder of their own, as `engine.old` is.
    """
    return target.with_name(f".{target.name}.replaced")


def _put(partial: Path, target: Path) -> None:
    """Make `partial` be `target`, in one step; what was there is removed afterwards."""
    before = partial
    if not target.exists() or not any(target.iterdir()):
        partial.rename(target)
    elif _exchange(partial, target):
        sync(target.parent)
    else:  # a file system that can't swap two names: for a moment there is neither
        before = _old(target)
        _clear(before)
        target.rename(before)
        partial.rename(target)
    _clear(before)
    if before.exists():
        logger.warning("%s is what was there before: it can't be removed.", before)
    sync(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """renameat2(2) with RENAME_EXCHANGE; False where the file system doesn't have it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _remove(path: Path) -> None:
    """Delete a folder, or what has its name: a link, a file."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _clear(path: Path) -> None:
    """Delete what can be deleted of a folder, or what has its name."""
    with suppress(OSError):
        _remove(path)
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process at a time; the system ends the lock of one that dies."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{target} can't be written: {error.strerror} ({target.parent})."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(
                f"Another process is writing {target} now ({path.name} is locked). Wait for its "
                "end, or choose another name."
            ) from error
        if _is(path, descriptor):
            break
        os.close(descriptor)  # its last owner has removed it meanwhile
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False

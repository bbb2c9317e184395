"""Folders that go with their fleet; where one was killed, with the next that starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 1 << 30  # free, for blocks to lie in memory: a container often has 64 MB of it
_ABANDONED_S = 3600.0  # after which a folder without a lock is nobody's
_LOCK = ".lock"


class OwnFolder:
    """A folder for this user alone, held by a lock for as long as its process lives.

    A lock and not a process's number says that it is in use: numbers come again, and differ
    between containers that share a folder.
    """

    def __init__(self, name: str, base: Path) -> None:
        """name: how its name, and those of others of its kind, begins. Raises OSError."""
        self._sweep(name, base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # nobody sees it without its lock

        self.remove = weakref.finalize(self, self._remove, self.path, self._lock)
        """Remove it and all that is in it; at the process's end as well."""

    @staticmethod
    def _remove(path: Path, lock: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)

    @staticmethod
    def _sweep(name: str, base: Path) -> None:
        """Remove what fleets of this user left that were killed.

        Without a lock is what is only just being made, or was made again by an instance that
        outlived its fleet.
        """
        for folder in base.glob(f"{name}-*"):
            with suppress(OSError):  # it is being removed, or in use
                about = folder.lstat()
                if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                    continue
                try:
                    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:
                    if time.time() - about.st_mtime > _ABANDONED_S:
                        shutil.rmtree(folder, ignore_errors=True)
                    continue
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def temporary() -> Path:
    """Where sockets may lie."""
    return Path(tempfile.gettempdir())


def memory() -> Path:
    """A folder whose files lie in memory; the one for temporary files where that has no room."""
    usable = os.access(_SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(_SHARED_MEMORY).free >= _LEAST_BYTES:
        return _SHARED_MEMORY
    return temporary()

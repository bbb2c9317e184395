"""Folders that go with their fleet; where one was killed, with the next that starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
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

    def remove(self) -> None:
        """Remove it and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def _sweep(name: str, base: Path) -> None:
        """Remove what fleets of this user left that were killed."""
        for found in base.glob(f"{name}-*/{_LOCK}"):
            with suppress(OSError):  # it is being removed, or in use
                if found.parent.is_symlink() or found.stat().st_uid != os.getuid():
                    continue
                lock = os.open(found, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(found.parent, ignore_errors=True)
                finally:
                    os.close(lock)


def temporary() -> Path:
    """Where sockets may lie."""
    return Path(tempfile.gettempdir())


def memory() -> Path:
    """A folder whose files lie in memory; where there is none, the one for temporary files."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else temporary()

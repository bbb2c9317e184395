"""Where the blocks of prompts lie on their way from who computed them to who goes on with them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_NAME = "penstock-kv"
_OWNED = re.compile(rf"{_NAME}-(\d+)-")


class ExchangeFolder:
    """A folder, in memory if it can be; it goes with its fleet, or with the next one."""

    def __init__(self) -> None:
        self._base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        if self._base is not None:
            self._sweep(self._base)
        prefix = f"{_NAME}-{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=self._base)

    def of(self, model: str) -> Path:
        """One model's folder."""
        folder = Path(self._folder.name) / re.sub(r"[^A-Za-z0-9._-]", "-", model)
        folder.mkdir(exist_ok=True)
        return folder

    def space(self, most_gib: float) -> float:
        """GiB that blocks may take: `most_gib`, or a quarter of what is free."""
        free = shutil.disk_usage(self._folder.name).free / (1 << 30)
        return min(most_gib, free / 4)

    def remove(self) -> None:
        """Remove it and all that is in it."""
        self._folder.cleanup()

    @staticmethod
    def _sweep(base: Path) -> None:
        """Remove what fleets of this user left that were killed."""
        for found in base.glob(f"{_NAME}-*"):
            owner = _OWNED.match(found.name)
            if owner is None or found.is_symlink() or found.stat().st_uid != os.getuid():
                continue
            if not Path(f"/proc/{owner[1]}").exists():
                shutil.rmtree(found, ignore_errors=True)

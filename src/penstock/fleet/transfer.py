"""Where the blocks of prompts lie on their way from who computed them to who goes on with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from penstock.fleet.folders import OwnFolder, memory

_GIB = 1 << 30


class ExchangeFolder:
    """A folder, in memory if it can be."""

    def __init__(self) -> None:
        self._folder = OwnFolder("penstock-kv", memory())

    def of(self, model: str) -> Path:
        """One model's folder."""
        folder = self._folder.path / re.sub(r"[^A-Za-z0-9._-]", "-", model)
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._folder.path

    def space(self, most_gib: float, models: int) -> float:
        """GiB that one model's blocks may take: `most_gib`, or its part of a quarter of what is
        free."""
        return min(most_gib, shutil.disk_usage(self._folder.path).free / _GIB / 4 / models)

    def clear(self) -> None:
        """Remove all blocks; who looks for one finds none."""
        for file in self._folder.path.glob("*/*/*.kv"):
            file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove it and all that is in it."""
        self._folder.remove()

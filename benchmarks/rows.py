"""Result files that grow row by row, so that a run that was interrupted goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.bench.environment import environment
from penstock.hardware import detect

Row = dict[str, Any]


class Rows:
    """Rows of one benchmark, in the file where they are kept."""

    def __init__(self, benchmark: str, setup: Row, file: Path | None, resume: bool) -> None:
        """file: None keeps nothing. resume: begin with the rows that it has.

        Ends the program where these were measured in another setup.
        """
        self._header = {"benchmark": benchmark, "setup": json.loads(json.dumps(setup))}
        self._file = file
        self.all: list[Row] = []
        if resume and file is not None and file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if {key: before.get(key) for key in self._header} != self._header:
                raise SystemExit(
                    f"{file} was measured with {before.get('setup')}, not with "
                    f"{self._header['setup']}. Leave --resume out, or name another file."
                )
            self.all = before["results"]

    def find(self, **facts: Any) -> Row | None:
        """The row that has all these values."""
        return next((r for r in self.all if all(r.get(k) == v for k, v in facts.items())), None)

    def add(self, row: Row) -> None:
        """Keep a row, on the disk at once."""
        self.all.append(row)
        if self._file is None:
            return
        whole = {**self._header, "results": self.all, **environment(detect())}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._file)

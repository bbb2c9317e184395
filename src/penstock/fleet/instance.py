"""An instance of a model, wherever it runs: what looks after it needs to know no more of it."""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import suppress
from typing import NamedTuple, Protocol

_KEPT_LINES = 20


class Address(NamedTuple):
    """Where an instance listens."""

    url: str
    key: str | None = None  # which it asks its callers for


class Instance(Protocol):
    """A process that serves a model: from its start to its end."""

    given_up: str | None
    """Why it was ended at once, or is lost."""

    @property
    def pid(self) -> int | None:
        """Its number, where it runs; None before."""

    @property
    def lack(self) -> str:
        """What it waits for before it can run; nothing where it doesn't."""

    @property
    def last_words(self) -> str:
        """What it said before it ended: the error, where there is one."""

    async def reached(self) -> Address:
        """Where it listens, once that is known."""

    async def ended(self) -> int:
        """Its exit code, or the signal that ended it below zero."""

    def end_at_once(self, why: str) -> None:
        """End it and all that it has started, without waiting."""

    async def end(self, patience_s: float) -> None:
        """Let it answer whom it has for so long, and end it."""


class Said:
    """The last lines that an instance logged, which stand in the fleet's log under its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def add(self, text: str) -> None:
        """A line more."""
        self.lines.append(text)
        with suppress(OSError, ValueError):  # nobody reads the log any more
            sys.stderr.write(f"{self._under_its_name(text)}\n")

    @property
    def last_words(self) -> str:
        """The last error, where there is one."""
        errors = [line for line in self.lines if line.lower().startswith("error:")]
        found = errors or list(self.lines)
        return found[-1].removeprefix("error: ") if found else "It said nothing."

    def _under_its_name(self, text: str) -> str:
        if text.startswith("{"):
            try:
                return json.dumps({"worker": self._name, **json.loads(text)})
            except ValueError:
                return f"{self._name} | {text}"
        return f"{self._name} | {text}"

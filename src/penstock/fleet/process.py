"""A process of ours that serves a model: started, listened to, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence

_KEPT_LINES = 20
_LINE_BYTES = 1 << 20
_PATIENCE_S = 5.0  # beyond a server's own time for its end
_RUN = "from penstock.cli.instance import run; run()"


class Instance:
    """One process. What it logs goes to stderr under its name."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], cpus: Sequence[int] | None
    ) -> Instance:
        """`penstock serve` with these arguments, on these CPUs (None: all)."""
        which = "all" if cpus is None else ",".join(map(str, cpus))
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_API")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _RUN, str(os.getpid()), which, "serve", *arguments,
            stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, limit=_LINE_BYTES, env=variables,
            start_new_session=True,  # Ctrl-C in a terminal is the fleet's to heed
        )  # fmt: skip
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def ended(self) -> int:
        """Its exit code, or the signal that ended it below zero; when all it said was read."""
        await asyncio.shield(self._reader)
        return await self._process.wait()

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def end(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL where that isn't heeded in time."""
        self.tell(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s + _PATIENCE_S):
                await self.ended()
        except TimeoutError:
            self.tell(signal.SIGKILL)
            await self.ended()

    @property
    def last_words(self) -> str:
        """What it said before it ended: the error, where there is one."""
        errors = [line for line in self.lines if line.lower().startswith("error:")]
        found = errors or list(self.lines)
        return found[-1].removeprefix("error: ") if found else "It said nothing."

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than any of ours
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self.lines.append(text)
                sys.stderr.write(f"{self._under_its_name(text)}\n")

    def _under_its_name(self, text: str) -> str:
        if text.startswith("{"):
            try:
                return json.dumps({"worker": self._name, **json.loads(text)})
            except ValueError:
                return f"{self._name} | {text}"
        return f"{self._name} | {text}"

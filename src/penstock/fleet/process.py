"""A process of ours that serves a model: started, listened to, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_KEPT_LINES = 20
_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0  # for what it said to be read, after its end
_PATIENCE_S = 5.0  # beyond a server's own time for its end
_RUN = "from penstock.cli.instance import run; run()"


class Instance:
    """One process. What it logs goes to stderr under its name."""

    def __init__(
        self, name: str, process: Process, said: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ) -> None:
        self._name = name
        self._process = process
        self._said, self._pipe = said, pipe
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.given_up: str | None = None  # why it was ended at once
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], cpus: Sequence[int] | None
    ) -> Instance:
        """`penstock serve` with these arguments, on these CPUs (None: all)."""
        which = "all" if cpus is None else ",".join(map(str, cpus))
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_API")}
        # A pipe of our own: asyncio's own is waited for with the process, whoever else has it.
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _RUN, str(os.getpid()), which, "serve", *arguments,
                stdin=DEVNULL, stdout=its, stderr=its, env=variables,
                start_new_session=True,  # Ctrl-C in a terminal is the fleet's to heed
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        said = asyncio.StreamReader(_LINE_BYTES)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(said), os.fdopen(ours, "rb")
        )
        return cls(name, process, said, pipe)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def ended(self) -> int:
        """Its exit code, or the signal that ended it below zero.

        What it said is read by then, unless a process that it started still has its output.
        """
        code = await self._process.wait()
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        self._reader.cancel()
        self._pipe.close()
        return code

    def end_at_once(self, why: str) -> None:
        """SIGKILL, to it and all that it has started."""
        self.given_up = self.given_up or why
        self._tell(signal.SIGKILL)

    def _tell(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def end(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL where that isn't heeded in time."""
        self._tell(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s + _PATIENCE_S):
                await self.ended()
        except TimeoutError:
            self._tell(signal.SIGKILL)
            await self.ended()

    @property
    def last_words(self) -> str:
        """What it said before it ended: the error, where there is one."""
        errors = [line for line in self.lines if line.lower().startswith("error:")]
        found = errors or list(self.lines)
        return found[-1].removeprefix("error: ") if found else "It said nothing."

    async def _read(self) -> None:
        while True:
            try:
                line = await self._said.readline()
            except ValueError:  # longer than any of ours
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self.lines.append(text)
                with suppress(OSError, ValueError):  # nobody reads the log any more
                    sys.stderr.write(f"{self._under_its_name(text)}\n")

    def _under_its_name(self, text: str) -> str:
        if text.startswith("{"):
            try:
                return json.dumps({"worker": self._name, **json.loads(text)})
            except ValueError:
                return f"{self._name} | {text}"
        return f"{self._name} | {text}"

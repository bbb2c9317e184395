"""A process of ours that serves a model: started, listened to, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from penstock.fleet.instance import Address, Said

_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0  # for what it said to be read, after its end
PATIENCE_S = 5.0  # beyond a server's own time for its end
_RUN = "from penstock.cli.instance import run; run()"
Hear = Callable[[str], Awaitable[None]]


class LocalInstance:
    """A process of this machine. What it logs goes to stderr under its name, or to `hear`."""

    def __init__(
        self, name: str, process: Process, output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport, url: str, hear: Hear | None,
    ) -> None:  # fmt: skip
        self._process = process
        self._output, self._pipe = output, pipe
        self._url = url
        self._hear = hear
        self._said = Said(name)
        self.given_up: str | None = None  # why it was ended at once
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        cpus: Sequence[int] | None,
        url: str = "",
        *,
        variables: Mapping[str, str] | None = None,
        hear: Hear | None = None,
    ) -> LocalInstance:
        """`penstock serve` with these arguments, on these CPUs (None: all).

        url: where they have it listen; variables: more of them, for it alone; hear: is told its
        lines and waited for, instead of stderr.
        """
        which = "all" if cpus is None else ",".join(map(str, cpus))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_API")}
        # A pipe of our own: asyncio's own is waited for with the process, whoever else has it.
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _RUN, str(os.getpid()), which, "serve", *arguments,
                stdin=DEVNULL, stdout=its, stderr=its, env=inherited | dict(variables or {}),
                start_new_session=True,  # Ctrl-C in a terminal is the fleet's to heed
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        output = asyncio.StreamReader(_LINE_BYTES)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb")
        )
        return cls(name, process, output, pipe, url, hear)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def lack(self) -> str:
        """It was started at once."""
        return ""

    @property
    def last_words(self) -> str:
        """What it said before it ended: the error, where there is one."""
        return self._said.last_words

    async def reached(self) -> Address:
        """Where it listens, or will."""
        return Address(self._url)

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
            async with asyncio.timeout(patience_s + PATIENCE_S):
                await self.ended()
        except TimeoutError:
            self._tell(signal.SIGKILL)
            await self.ended()

    async def _read(self) -> None:
        while True:
            try:
                line = await self._output.readline()
            except ValueError:  # longer than any of ours
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text and self._hear is not None:
                await self._hear(text)
            elif text:
                self._said.add(text)

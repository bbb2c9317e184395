"""One instance of a model, as the fleet sees it: is it there, and how busy is it."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from penstock.fleet.link import Link
from penstock.fleet.process import Instance
from penstock.http1 import ExchangeError

logger = logging.getLogger("penstock.fleet")

State = Literal["starting", "ready", "unready", "stopping", "stopped", "failed"]
PROBE_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_STARTING_S = 0.1  # between two probes of one that starts
_MISSES = 3  # probes in a row without an answer: nobody is there
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STARTS = 3  # that may end in a signal before anything is ready
_EXPLAINED = (1, 2)  # exit codes of one that has said why; it would say so again


class Worker:
    """Where requests to a model may go."""

    def __init__(self, name: str, model: str, link: Link, changed: Callable[[], None]) -> None:
        """model: what requests call it; changed: is called when its state has."""
        self.name = name
        self.model = model
        self.link = link
        self.state: State = "starting"
        self.reason = "It is starting."
        self.outstanding = 0  # sequences of this fleet's that it has
        self.capacity = 0  # sequences at once, once it has said so
        self.models: list[dict[str, Any]] = []  # as its /v1/models has them
        self.starts = 0  # which of its lives this is
        self.since = time.time()  # in this state
        self._changed = changed
        self._misses = 0
        self._broke = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return self.link.url

    def become(self, state: State, reason: str = "") -> None:
        """Take on a state, and tell the group."""
        if state == "ready":
            self._misses = 0
        if (state, reason) == (self.state, self.reason):
            return
        if state != self.state:
            self.since = time.time()
            fields = {"worker": self.name, "state": state}
            level = logging.WARNING if state in ("unready", "failed") else logging.INFO
            logger.log(
                level, "worker", extra={"fields": fields | ({"why": reason} if reason else {})}
            )
        self.state, self.reason = state, reason
        self._changed()

    async def run(self) -> None:
        """Look after it until cancelled."""
        self.starts = 1
        await self.watch()

    async def stop(self, patience_s: float) -> None:
        """Use it no longer; who runs there goes on."""
        self.become("stopped")

    async def watch(self) -> None:
        """Ask how it is, again and again."""
        while True:
            await self.probe()
            self._broke.clear()
            if self.state != "starting":
                with suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S):
                        await self._broke.wait()
            await asyncio.sleep(_STARTING_S)

    async def probe(self) -> None:
        """Ask once."""
        try:
            status, said = await self.link.get("/ready", _PROBE_TIMEOUT_S)
            told = said if isinstance(said, dict) else {}
            if status != 200:
                if self.state != "stopping":
                    reason = str(told.get("reason", f"It answers HTTP {status}."))
                    self.become("starting" if self.state == "starting" else "unready", reason)
                return
            await self._look()
        except ExchangeError as failure:
            self._missed(str(failure))
            return
        if self.state == "stopping":
            return
        names = [str(x["id"]) for x in self.models]
        if self.model in names:
            self.become("ready")
        else:
            there = f"It serves {', '.join(names) or 'nothing'}"
            self.become("unready", f"{there}, not {self.model!r}: name the model as it does.")

    async def _look(self) -> None:
        _, load = await self.link.get("/load", _PROBE_TIMEOUT_S)
        if isinstance(load, dict) and isinstance(load.get("capacity"), int):
            self.capacity = max(1, load["capacity"])
        if self.state != "ready" or not self.models:
            _, listed = await self.link.get("/v1/models", _PROBE_TIMEOUT_S)
            found = listed.get("data") if isinstance(listed, dict) else None
            self.models = [x for x in found or [] if isinstance(x, dict) and "id" in x]

    def _missed(self, why: str) -> None:
        if self.state in ("starting", "stopping"):
            return
        self._misses += 1
        if self._misses >= _MISSES or self.state == "unready":
            self.become("unready", why)
            self.link.abort()  # what is still being answered there won't be

    def broke(self, why: str) -> None:
        """A request found nobody: don't send more until a probe, which comes now, has found one."""
        if self.state == "ready":
            self.become("unready", why)
            self._broke.set()


class LocalWorker(Worker):
    """A process of ours: started again when it has ended."""

    def __init__(
        self,
        name: str,
        model: str,
        socket: Path,
        arguments: Sequence[str],
        cpus: Sequence[int] | None,
        start_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(name, model, Link(f"unix:{socket}"), changed)
        self._arguments = [*arguments, "--uds", str(socket)]
        self._cpus = cpus
        self._start_timeout_s = start_timeout_s
        self._instance: Instance | None = None
        self._end = asyncio.Event()  # it isn't to be started again
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._instance is None else self._instance.pid

    async def run(self) -> None:
        """Start it, as often as need be, until it is stopped or can't be started."""
        failed = 0  # starts in a row that came to nothing
        while not self._end.is_set():
            self.become("starting", "It is starting.")
            self.starts += 1
            self.capacity, self.models = 0, []
            async with self._starting:
                if self._end.is_set():
                    break
                self._instance = await Instance.start(self.name, self._arguments, self._cpus)
            was_ready, code = await self._live(self._instance)
            self.link.abort()
            if self._end.is_set():
                break
            failed = 0 if was_ready else failed + 1
            why = self._why(code, self._instance.last_words)
            if not was_ready and (code in _EXPLAINED or failed >= _STARTS):
                self.become("failed", why)
                return
            self.become("unready", why)
            await asyncio.sleep(_BACKOFF_S[min(failed, len(_BACKOFF_S) - 1)])
        self.become("stopped")

    async def _live(self, instance: Instance) -> tuple[bool, int]:
        """(whether it was ready, its exit code)."""
        was_ready = False
        watcher = asyncio.create_task(self.watch())
        end = asyncio.create_task(instance.ended())
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while not end.done():
                await asyncio.wait({end}, timeout=_STARTING_S if not was_ready else PROBE_S)
                was_ready = was_ready or self.state == "ready"
                if not was_ready and time.monotonic() > deadline:
                    instance.lines.append(f"It wasn't ready within {self._start_timeout_s:g} s.")
                    instance.tell(signal.SIGKILL)
            return was_ready, end.result()
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            if not end.done():  # this task is being cancelled
                end.cancel()
                instance.tell(signal.SIGKILL)

    @staticmethod
    def _why(code: int, last_words: str) -> str:
        if code >= 0:
            return f"Its process ended with {code}: {last_words}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"Its process was ended by {name}."

    async def stop(self, patience_s: float) -> None:
        """End the process; it lets running requests end within `patience_s`."""
        self._end.set()
        async with self._starting:
            instance = self._instance
        if instance is not None and self.state not in ("stopped", "failed"):
            self.become("stopping", "It is being stopped.")
            await instance.end(patience_s)

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

from penstock.fleet.instance import Instance
from penstock.fleet.link import Link
from penstock.fleet.process import LocalInstance
from penstock.http1 import ExchangeError

logger = logging.getLogger("penstock.fleet")

State = Literal["starting", "ready", "unready", "stopping", "stopped", "failed"]
PROBE_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_STARTING_S = 0.1  # between two probes of one that starts
_MISSES = 3  # probes in a row without an answer: nobody is there
_HANGS = 6  # of a process of ours: it won't answer any more
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
        self.lack = ""  # what it waits for before it can start
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
            try:
                await self.probe()
            except Exception as error:  # whatever it is, somebody must go on asking
                logger.exception("an internal error")
                self._missed(str(error))
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
                self._misses = 0
                await self._unready(str(told.get("reason", f"/ready answers HTTP {status}.")))
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

    async def _unready(self, why: str) -> None:
        """It says that it takes no requests."""
        if self.state != "stopping":
            self.become("unready", why)

    def _missed(self, why: str) -> None:
        """It didn't answer."""
        if self.state == "stopping":
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


class OwnWorker(Worker):
    """A process of ours: started again when it has ended."""

    def __init__(
        self,
        name: str,
        model: str,
        url: str,
        start_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        """url: where it will be, as far as that is known."""
        super().__init__(name, model, Link(url), changed)
        self._start_timeout_s = start_timeout_s
        self._instance: Instance | None = None
        self._is_late = False  # this life had all its time to start
        self._end = asyncio.Event()  # it isn't to be started again
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._instance is None else self._instance.pid

    async def _start(self) -> Instance:
        """Start its process. Raises OSError where none can be made."""
        raise NotImplementedError

    async def _unready(self, why: str) -> None:
        if self.state == "starting":
            self.become("starting", why)
            return
        status, _ = await self.link.get("/health", _PROBE_TIMEOUT_S)
        if status == 503:
            self._give_up(why)
        await super()._unready(why)

    def _missed(self, why: str) -> None:
        if self.state != "starting":
            super()._missed(why)
            if self._misses >= _HANGS:
                self._give_up(f"It doesn't answer any more: {why}")

    def _give_up(self, why: str) -> None:
        """End a process that won't do anything any more; another takes its place."""
        if self._instance is not None:
            self._instance.end_at_once(why)

    async def run(self) -> None:
        """Start it, as often as need be, until it is stopped or can't be started."""
        failed = 0  # starts in a row that came to nothing
        while not self._end.is_set():
            self.become("starting", "It is starting.")
            self.starts += 1
            fields = {"worker": self.name, "state": "starting"}
            logger.info("worker", extra={"fields": fields})
            self.capacity, self.models, self.lack, self._is_late = 0, [], "", False
            was_ready, code = False, None
            try:
                async with self._starting:
                    if self._end.is_set():
                        break
                    self._instance = await self._start()
                was_ready, code = await self._live(self._instance)
                why = self._why(code, self._instance)
            except OSError as error:  # no process could be made
                why = f"Its process can't be started: {error}."
            self.link.abort()
            if self._end.is_set():
                break
            failed = 0 if was_ready else failed + 1
            waited = self._is_late and self.lack != ""  # in vain, for what isn't free
            if not was_ready and (code in _EXPLAINED or failed >= _STARTS or waited):
                self.become("failed", why)
                return
            self.become("unready", why)
            await asyncio.sleep(_BACKOFF_S[min(failed, len(_BACKOFF_S) - 1)])
        self.become("stopped")

    async def _live(self, instance: Instance) -> tuple[bool, int]:
        """(whether it was ready, its exit code)."""
        was_ready = False
        watcher = asyncio.create_task(self._find(instance))
        end = asyncio.create_task(instance.ended())
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while not end.done():
                await asyncio.wait({end}, timeout=_STARTING_S if not was_ready else PROBE_S)
                was_ready = was_ready or self.state == "ready"
                self._tell(instance.lack)
                self._is_late = not was_ready and time.monotonic() > deadline
                if self._is_late:
                    why = f"It wasn't ready within {self._start_timeout_s:g} s. {self.lack}"
                    instance.end_at_once(why.strip())
            return was_ready, end.result()
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
            if not end.done():  # this task is being cancelled
                end.cancel()
                instance.end_at_once("The fleet let it go.")

    async def _find(self, instance: Instance) -> None:
        """Look after it, once it is known where it is."""
        url, key = await instance.reached()
        if url != self.url:
            self.link = Link(url, key)
        await self.watch()

    def _tell(self, lack: str) -> None:
        """What it waits for, to whoever asks why it isn't ready."""
        if lack != self.lack and self.state == "starting":
            self.lack = lack
            self.become("starting", lack or "It is starting.")

    @staticmethod
    def _why(code: int, instance: Instance) -> str:
        if instance.given_up is not None:
            return instance.given_up
        if code >= 0:
            return f"Its process ended with {code}: {instance.last_words}"
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


class LocalWorker(OwnWorker):
    """One of this machine, on a Unix socket."""

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
        super().__init__(name, model, f"unix:{socket}", start_timeout_s, changed)
        self._arguments = [*arguments, "--uds", str(socket)]
        self._cpus = cpus

    async def _start(self) -> Instance:
        return await LocalInstance.start(self.name, self._arguments, self._cpus, self.url)

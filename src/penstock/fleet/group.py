"""The instances of one model: leased to requests, started and ended as they are needed."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.fleet.ask import Ask
from penstock.fleet.choosing import chooser_of
from penstock.fleet.cluster import Cluster
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.link import Link
from penstock.fleet.remote import RemoteWorker
from penstock.fleet.worker import LocalWorker, OwnWorker, Worker
from penstock.server.errors import ApiError

logger = logging.getLogger("penstock.fleet")

SCALE_UP_S = 2.0  # that demand must last for another instance
_ADDED_BYTES = 4096  # to a body, at most
_QUEUE = 1 << 16  # of an instance: the fleet bounds all of them together
_LATER_S = 10.0  # after the fleet has cut a client off that doesn't read
ELSEWHERE_S = 10.0  # are waited for a server that isn't ours to start
AGAIN_S = 30.0  # until a model that couldn't be loaded is tried again for a request
_STATES = ("ready", "starting", "unready")


@dataclass(slots=True)
class Lease:
    """A request's place at a worker."""

    worker: Worker
    sequences: int  # that it is to compute
    life: int = field(init=False)  # of the worker's
    _held: bool = True

    def __post_init__(self) -> None:
        self.life = self.worker.starts
        self.worker.outstanding += self.sequences

    def close(self) -> None:
        """Give it back; once is enough."""
        if self._held:
            self._held = False
            self.worker.outstanding -= self.sequences


class Group:
    """One model's instances."""

    def __init__(
        self,
        config: ModelConfig,
        fleet: FleetConfig,
        folder: Path,
        make_room: Callable[[Group], Awaitable[None]],
        cluster: Cluster | None = None,
    ) -> None:
        """folder: where sockets may lie; make_room: for it among the models that are loaded;
        cluster: on which it runs, where it does.
        """
        own = config.prefillers
        self.prefill = None if own is None else Group(own, fleet, folder, make_room, cluster)
        self._cluster = cluster
        self._needs = fleet.needs_of(config)
        self._label = f"{config.name}/{'p' if config.is_prefill else ''}"
        self._make_room = make_room
        self.config = config
        self.name = config.name
        self.chooser = chooser_of(fleet.policy)
        self.waiting = 0  # sequences of requests that no worker has
        self.queued = 0  # such requests' prompts
        self.used = time.monotonic()  # when a request last asked for it
        self.created = int(time.time())
        self.listed: list[dict[str, Any]] = []  # what its workers said of themselves
        self._fleet = fleet
        self._folder = folder
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._stops: dict[Worker, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # of now: set, and made anew, with each change
        self._complained = False
        self._scarce_since: float | None = None  # since when another instance was wanted
        self._idle_since: float | None = None  # since when one was too many
        self._key = os.environ.get(config.api_key_env) if config.api_key_env else None
        for i, url in enumerate(config.workers):
            self._add(Worker(f"{self._label}{i}", self.name, Link(url, self._key), self._wake))

    # ── what there is ────────────────────────────────────────────────────────────────────────

    @property
    def is_local(self) -> bool:
        """Whether its workers are processes of ours."""
        return self.config.model is not None

    @property
    def may_rest(self) -> bool:
        """Whether it may be without an instance."""
        return self.is_local and not self.config.instances[0]

    @property
    def workers(self) -> list[Worker]:
        """All that were started and haven't been ended."""
        return list(self._tasks)

    @property
    def ready(self) -> list[Worker]:
        """Those that take requests."""
        return [x for x in self._tasks if x.state == "ready"]

    @property
    def alive(self) -> list[Worker]:
        """Those that take requests or will."""
        return [x for x in self._tasks if x.state in _STATES]

    @property
    def is_loaded(self) -> bool:
        """Whether a process of it holds memory."""
        return any(x.state not in ("stopped", "failed") for x in self._tasks)

    @property
    def backlog(self) -> int:
        """Requests that nobody computes now."""
        beyond = (max(0, x.outstanding - x.capacity) for x in self._tasks)
        return self.queued + sum(beyond)

    @property
    def has_room(self) -> bool:
        """Whether one more would be computed at once."""
        return self.outstanding < sum(worker.capacity for worker in self.ready)

    def complain(self, worker: Worker, status: int, said: str) -> None:
        """Tell, once, of one that computes no prompts for others."""
        if not self._complained:
            self._complained = True
            fields = {"worker": worker.name, "status": status, "why": said}
            logger.warning("prefill refused", extra={"fields": fields})

    @property
    def outstanding(self) -> int:
        """Sequences of requests that haven't been answered."""
        return self.waiting + sum(worker.outstanding for worker in self._tasks)

    @property
    def demand(self) -> float:
        """Requests over what the ready instances can do at once; infinite where there are none."""
        capacity = sum(worker.capacity for worker in self.ready)
        return self.outstanding / capacity if capacity else math.inf if self.outstanding else 0.0

    @property
    def wanted(self) -> int:
        """Instances for which demand would be what it should; not bounded by how many may be.

        As many as always run, at least.
        """
        least = self.config.instances[0]
        known = [worker.capacity for worker in self._tasks if worker.capacity]
        if not known:
            return max(least, int(self.outstanding > 0))
        each = sum(known) / len(known)
        return max(least, math.ceil(self.outstanding / (each * self.config.target_demand)))

    @property
    def state(self) -> str:
        """As llama.cpp's router says it: loaded, loading, unloaded, failed."""
        if self.ready:
            return "loaded"
        if any(x.state in ("starting", "unready") for x in self._tasks):
            return "loading"
        return "failed" if any(x.state == "failed" for x in self._tasks) else "unloaded"

    @property
    def why(self) -> str:
        """What is the matter with those that aren't ready."""
        return next((x.reason for x in self._tasks if x.state != "ready" and x.reason), "")

    @property
    def lack(self) -> str:
        """What an instance that shall run waits for."""
        return next((x.lack for x in self.alive if x.lack), "")

    @property
    def names(self) -> list[str]:
        """Its own, and of adapters that its workers serve."""
        listed = [str(x["id"]) for x in self.listed if x.get("parent") is not None]
        own = [self.name, *self.config.adapters]
        return [*own, *(name for name in listed if name not in own)]

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    async def lease(self, ask: Ask, tried: set[tuple[str, int]]) -> Lease:
        """A place at an instance as soon as one is ready, rather not one in `tried` (names, lives).

        Raises ApiError 503 where none will be.
        """
        self.used = time.monotonic()
        self.waiting += ask.sequences
        self.queued += ask.prompts
        patience_s = self._fleet.start_timeout_s if self.is_local else ELSEWHERE_S
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    changed = self._changed  # before looking: what comes meanwhile sets it
                    found = [x for x in self.ready if (x.name, x.starts) not in tried]
                    if found or self.ready:
                        return Lease(self.chooser.choose(found or self.ready, ask), ask.sequences)
                    await self._ask_for_one()
                    await changed.wait()
        except TimeoutError as error:
            raise ApiError(
                503,
                f"No instance of {self.name!r} was ready within {patience_s:g} s. {self.why}",
                code="model_not_ready",
                retry_after_s=5,
            ) from error
        finally:
            self.waiting -= ask.sequences
            self.queued -= ask.prompts

    def lease_at(self, name: str, ask: Ask) -> Lease:
        """A place at the instance of this name, which keeps what the request goes on from.

        Raises ApiError 503 where it takes no requests now, 400 where it has ended.
        """
        self.used = time.monotonic()
        worker = self.keeper(name)
        if worker is None:
            raise ApiError(
                400,
                f"What the request goes on from was kept by {name}, which has ended, and with it "
                "what it kept. Send the items of the conversation instead.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return Lease(self.chooser.choose([worker], ask), ask.sequences)

    def keeper(self, name: str) -> Worker | None:
        """The instance of this name; None: it has ended. Raises ApiError 503 for one not ready."""
        found = next((x for x in self._tasks if x.name == name), None)
        if found is not None and found.state == "unready":
            raise ApiError(
                503, f"{name} isn't ready. {found.reason}", code="model_not_ready", retry_after_s=5
            )
        return found if found is not None and found.state == "ready" else None

    async def _ask_for_one(self) -> None:
        """See to it that one comes. Raises ApiError 503 where none can."""
        if self.alive:
            return
        failed = self._failed_lately
        if failed is not None:
            raise ApiError(
                503, f"{self.name!r} can't be loaded. {failed.reason}", code="model_failed"
            )
        await self._make_room(self)
        if not any(x.state == "stopping" for x in self._tasks):
            self.start(max(1, self.config.instances[0]))

    @property
    def _failed_lately(self) -> Worker | None:
        now = time.time()
        return next(
            (x for x in self._tasks if x.state == "failed" and now - x.since < AGAIN_S), None
        )

    # ── instances ────────────────────────────────────────────────────────────────────────────

    def start(self, count: int) -> None:
        """Start instances until there are `count`; those that failed are tried again."""
        for worker in [x for x in self._tasks if x.state == "failed"]:
            self._remove(worker)
        while self.is_local and len(self.alive) < count:
            taken = {worker.name for worker in self._tasks}
            index = next(i for i in range(count + len(taken)) if f"{self._label}{i}" not in taken)
            self._add(self._local(index))

    def _local(self, index: int) -> OwnWorker:
        name, arguments = f"{self._label}{index}", self._arguments()
        timeout_s = self._fleet.start_timeout_s
        if self._cluster is not None and self._needs is not None:
            return RemoteWorker(
                name, self.name, arguments, self._cluster, self._needs, timeout_s, self._wake
            )
        socket = self._folder / f"{abs(hash(self._label)) % 10**8}-{index}.sock"
        cpus = self.config.cpus_of(index % self.config.instances[1])
        return LocalWorker(name, self.name, socket, arguments, cpus, timeout_s, self._wake)

    def _arguments(self) -> list[str]:
        """Of `penstock serve`, whatever it listens on."""
        model = str(self.config.model)
        if self._needs is not None and Path(model).exists():
            model = str(Path(model).resolve())  # a node has other folders for its current one
        front = self._fleet.server
        return [
            model, "--served-model-name", self.name,
            f"--log-format={front.log_format}",
            "--log-requests" if front.log_requests else "--no-log-requests",
            f"--shutdown-timeout={front.shutdown_timeout_s}",
            f"--max-body-size={front.max_body_bytes + _ADDED_BYTES}",
            f"--max-queue-size={max(front.max_queue_size, _QUEUE)}",
            f"--write-timeout={front.write_timeout_s + _LATER_S}", *self.config.options,
        ]  # fmt: skip

    def _add(self, worker: Worker) -> None:
        self._tasks[worker] = asyncio.create_task(worker.run())

    def _remove(self, worker: Worker) -> None:
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        worker.link.abort()
        self.chooser.forget(worker)
        self._wake()

    async def stop(self, worker: Worker) -> None:
        """End one: it answers whom it has, and goes; also where who asked for that doesn't wait."""
        task = self._stops.get(worker)
        if task is None:
            task = self._stops[worker] = asyncio.create_task(self._stop(worker))
        await asyncio.shield(task)

    async def _stop(self, worker: Worker) -> None:
        try:
            await worker.stop(self._fleet.server.shutdown_timeout_s)
        finally:
            self._remove(worker)
            self._stops.pop(worker, None)

    async def stop_all(self) -> None:
        """End all of them."""
        await asyncio.gather(*(self.stop(worker) for worker in self.workers))

    def _wake(self) -> None:
        for worker in self._tasks:
            if worker.state != "ready":
                self.chooser.forget(worker)
        found = [x for worker in self.ready for x in worker.models]
        self.listed = list({x["id"]: x for x in found}.values()) or self.listed
        self._changed.set()
        self._changed = asyncio.Event()

    # ── scaling ──────────────────────────────────────────────────────────────────────────────

    def scale(self, now: float) -> Worker | None:
        """Start what demand wants; one that is to end, where there is one too many."""
        if not self.is_local:
            return None
        least, most = self.config.instances
        wanted = min(max(self.wanted, least), most)
        current = len(self.alive)
        starting = any(x.state == "starting" and not x.lack for x in self._tasks)
        if self.outstanding or starting:  # it rests from when it is ready
            self.used = now
        scarce = wanted > current and self._failed_lately is None
        idle = wanted < current
        if scarce and current < least:  # whatever is asked for, so many always run
            self.start(least)
            return None
        self._scarce_since = (self._scarce_since or now) if scarce and current else None
        self._idle_since = (self._idle_since or now) if idle and not starting else None
        if self._scarce_since is not None and now - self._scarce_since >= SCALE_UP_S:
            self._scarce_since = None
            self.start(wanted)
        if self._idle_since is None or now - self._idle_since < self.config.idle_timeout_s:
            return None
        if current == 1 and (self.outstanding or now - self.used < self.config.idle_timeout_s):
            return None
        self._idle_since = now
        return min(self.alive, key=lambda x: (not x.lack, x.outstanding, -x.since))

    def describe(self) -> dict[str, Any]:
        """Everything there is to say of it, for people and programs."""
        demand = self.demand
        return {
            "model": self.name,
            "state": self.state,
            "instances": len(self.alive),
            "least": self.config.instances[0] if self.is_local else len(self.config.workers),
            "most": self.config.instances[1] if self.is_local else len(self.config.workers),
            "wanted": self.wanted,
            "demand": None if math.isinf(demand) else round(demand, 4),
            "outstanding": self.outstanding,
            **({} if self.prefill is None else {"prefill": self.prefill.describe()}),
            "workers": [
                {
                    "name": x.name,
                    "url": x.url,
                    "state": x.state,
                    "reason": x.reason,
                    "outstanding": x.outstanding,
                    "capacity": x.capacity,
                    "starts": x.starts,
                    "pid": getattr(x, "pid", None),
                }
                for x in self._tasks
            ],
        }

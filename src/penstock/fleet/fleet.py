"""Models behind one server: who is asked, who runs, who is to end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from penstock.errors import PenstockError, nearest
from penstock.fleet.cluster import Cluster
from penstock.fleet.config import DISK_DIR, DISK_SPACE, FleetConfig, ModelConfig
from penstock.fleet.ensemble import Ensemble
from penstock.fleet.folders import OwnFolder, temporary
from penstock.fleet.group import Group
from penstock.fleet.kept import Kept
from penstock.fleet.metrics import FleetMetrics
from penstock.fleet.transfer import ExchangeFolder
from penstock.server.errors import ApiError
from penstock.server.limits import Gate

logger = logging.getLogger("penstock.fleet")

SPACE_GIB = 4.0  # at most, of a model's prompts on their way
ROOM_S = 0.1  # between two looks whether a model rests
TICK_S = 0.5
_KEPT_LATENCIES = 256
State = Literal["starting", "ready", "draining", "failed"]


class FleetError(PenstockError):
    """A model that was to run from the start can't."""


class Fleet:
    """The models, and what the server in front of them needs to know."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config.server
        self.fleet_config = config
        self.gate = Gate(config.server.max_queue_size, config.server.accounts)
        self.state: State = "starting"
        self.running = 0  # requests that were let in and haven't been answered
        self.failure: PenstockError | None = None
        self.address = ""  # where it listens, for the log
        self.on_failure: Callable[[], None] | None = None
        self.recent_s: deque[float] = deque(maxlen=_KEPT_LATENCIES)  # from arrival to end
        self.groups: dict[str, Group] = {}
        self.ensembles: dict[str, Ensemble] = {one.name: one for one in config.ensembles}
        self.metrics = FleetMetrics(self)
        self.kept = Kept()  # by instances
        self._folder: OwnFolder | None = None
        self._exchange: ExchangeFolder | None = None
        self._cluster: Cluster | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._room = asyncio.Lock()

    # ── the beginning and the end ────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start what always runs, and look after it. Doesn't wait until anything is ready."""
        if self.fleet_config.ray is not None:
            try:
                self._cluster = await Cluster.connect(self.fleet_config.ray)
            except PenstockError as error:
                self._fail(error)
                return
        self._folder = OwnFolder("penstock-fleet", temporary())
        folder = self._folder.path
        for model in self.fleet_config.models:
            own = self._with_transfer(model)
            self.groups[model.name] = Group(
                own, self.fleet_config, folder, self._make_room, self._cluster
            )
        for group in self.everyone:
            group.start(group.config.instances[0])
        self._keeper = asyncio.create_task(self._keep())

    def _with_transfer(self, model: ModelConfig) -> ModelConfig:
        """With a folder by which its instances hand prompts over, where some shall."""
        if not model.prefill or model.given(DISK_DIR):
            return model
        if self._exchange is None:
            self._exchange = ExchangeFolder()
        several = sum(1 for x in self.fleet_config.models if x.prefill)
        space = self._exchange.space(model.prefill_space or SPACE_GIB, several)
        fields = {"model": model.name, "folder": str(self._exchange.path), "gib": round(space, 2)}
        logger.info("prompts are handed over", extra={"fields": fields})
        more = (f"{DISK_DIR}={self._exchange.of(model.name)}", f"{DISK_SPACE}={space:.6f}")
        return replace(model, options=(*model.options, *more), prefill_space=None)

    def forget_prompts(self) -> None:
        """Those on their way from one instance to another, too."""
        if self._exchange is not None:
            self._exchange.clear()

    @property
    def everyone(self) -> list[Group]:
        """All groups, those that compute prompts for others among them."""
        groups = self.groups.values()
        return [*groups, *(x.prefill for x in groups if x.prefill is not None)]

    async def _keep(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                logger.exception("an internal error")
            await asyncio.sleep(TICK_S)

    def _look(self) -> None:
        if self.state == "starting":
            self._look_at_the_start()
        now = time.monotonic()
        for group in self.everyone:
            surplus = group.scale(now)
            if surplus is not None:
                self._end(group.stop(surplus))

    def _look_at_the_start(self) -> None:
        """A model that was never there is an error of whoever wrote the configuration."""
        expected = [x for x in self.everyone if x.is_local and x.config.instances[0] > 0]
        for group in expected:
            failed = next((x for x in group.workers if x.state == "failed"), None)
            if failed is not None:
                self._fail(FleetError(f"The model {group.name!r} can't run. {failed.reason}"))
                return
        if all(len(group.ready) >= group.config.instances[0] for group in expected):
            self.state = "ready"
            fields = {x.name: len(x.ready) for x in self.groups.values()}
            logger.info("ready", extra={"fields": {"url": self.address, **fields}})

    def _fail(self, why: PenstockError) -> None:
        self.state = "failed"
        self.failure = why
        if self.on_failure is not None:
            self.on_failure()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state != "failed":
            self.state = "draining"

    async def stop(self) -> None:
        """End every instance of ours."""
        self.drain()
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        ends = (*(group.stop_all() for group in self.everyone), *self._ends)
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, Exception):
                logger.error("an internal error", exc_info=end)
        if self._cluster is not None:
            await self._cluster.disconnect()
        if self._exchange is not None:
            self._exchange.remove()
        if self._folder is not None:
            self._folder.remove()

    def _end(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    # ── models ───────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> list[str]:
        """What requests may name."""
        return [name for x in self.groups.values() for name in x.names] + list(self.ensembles)

    def group(self, name: str | None) -> Group:
        """The model of this name, or whose adapter it is; None: the first.

        Raises ApiError 404, and 503 while the fleet ends.
        """
        if self.state in ("draining", "failed"):
            raise ApiError(
                503, "The fleet is shutting down.", code="server_draining", retry_after_s=5
            )
        if name is None:
            return next(iter(self.groups.values()))
        found = self.groups.get(name)
        if found is None:
            found = next((x for x in self.groups.values() if name in x.names), None)
        if found is None:
            known = self.names
            raise ApiError(
                404,
                f"The model {name[:80]!r} isn't served here.{nearest(name[:80], known)} There is: "
                f"{', '.join(known)}.",
                param="model",
                code="model_not_found",
            )
        return found

    async def load(self, name: str) -> None:
        """Have at least one instance of it started. Raises ApiError."""
        self._check_model(name)
        group = self.group(name)
        self._check_local(group, "loaded")
        if not group.alive:
            await self._make_room(group, waits=False)
            group.start(max(1, group.config.instances[0]))
            group.used = time.monotonic()

    def unload(self, name: str) -> None:
        """End all its instances; they answer whom they have. Raises ApiError."""
        self._check_model(name)
        group = self.group(name)
        self._check_local(group, "unloaded")
        if name != group.name:
            raise ApiError(
                400, f"{name!r} is an adapter of {group.name!r}, which has it while it is loaded.",
                param="model",
            )  # fmt: skip
        if group.config.instances[0]:
            raise ApiError(
                400,
                f"{name!r} always has {group.config.instances[0]} instances. Give it instances "
                "from 0 to unload it.",
                param="model",
            )
        for worker in group.workers:
            self._end(group.stop(worker))

    def _check_model(self, name: str) -> None:
        if name in self.ensembles:
            raise ApiError(400, f"{name!r} is an ensemble; load its models.", param="model")

    @staticmethod
    def _check_local(group: Group, what: str) -> None:
        if not group.is_local:
            raise ApiError(
                400, f"{group.name!r} runs elsewhere; it can't be {what} here.", param="model"
            )

    async def _make_room(self, group: Group, *, waits: bool = True) -> None:
        """End the model that rests longest where as many are loaded as may be.

        waits: for one to rest; who asks has a limit. Else raises ApiError 503 where none does.
        """
        most = self.fleet_config.max_loaded
        if most is None:
            return
        async with self._room:
            while not group.is_loaded:
                loaded = [x for x in self.groups.values() if x.is_local and x.is_loaded]
                if len(loaded) < most:
                    return
                resting = [
                    x for x in loaded if not (x.config.instances[0] or x.outstanding)
                ]  # fmt: skip
                if not resting and waits:
                    await asyncio.sleep(ROOM_S)
                    continue
                if not resting:
                    raise ApiError(
                        503,
                        f"{len(loaded)} models are loaded, as many as may be, and all are busy: "
                        f"{', '.join(x.name for x in loaded)}.",
                        code="models_busy",
                        retry_after_s=5,
                    )
                await min(resting, key=lambda x: x.used).stop_all()

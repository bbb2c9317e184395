"""Instances on the nodes of a Ray cluster: actors, each with a server as its process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from penstock import __version__
from penstock.errors import ConfigError
from penstock.fleet.actor import Order
from penstock.fleet.cluster import Actor, Cluster, LostError
from penstock.fleet.instance import Address, Said
from penstock.fleet.needs import Needs
from penstock.fleet.process import PATIENCE_S
from penstock.fleet.worker import OwnWorker

logger = logging.getLogger("penstock.fleet")

_LACKING_S = 2.0  # without an actor, until what is free is looked at
_ENDING_S = 5.0  # for a server to have ended at once, before its actor is
_LEAVING_S = 5.0  # for Ray to tell that an actor has ended, once it was told to end it
_CANNOT = 1  # the exit code of one that has said why it can't run
_LOST = -signal.SIGKILL
T = TypeVar("T")


class RemoteInstance:
    """A server on a node. What it logs goes to stderr under its name, as that of one here."""

    def __init__(
        self, name: str, arguments: Sequence[str], cluster: Cluster, needs: Needs, actor: Actor
    ) -> None:
        """actor: one for these needs, which Ray may not have started yet."""
        key = secrets.token_urlsafe(32)  # which only this fleet knows
        self._order = Order(
            name, tuple(arguments), key, needs.num_cpus, needs.num_gpus, __version__
        )
        self._cluster, self._needs = cluster, needs
        self._said = Said(name)
        self._address: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._ends: set[asyncio.TimerHandle] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pid: int | None = None
        self.lack = ""
        self.given_up: str | None = None
        self._actor = actor
        self._life = asyncio.create_task(self._live())

    @property
    def last_words(self) -> str:
        """What it said before it ended: the error, where there is one."""
        return self._said.last_words

    async def reached(self) -> Address:
        """Where it listens, once Ray has started it."""
        return await asyncio.shield(self._address)

    async def ended(self) -> int:
        """The server's exit code; SIGKILL's where the actor or its node is lost."""
        return await asyncio.shield(self._life)

    def end_at_once(self, why: str) -> None:
        """The server; where that doesn't do in time, or there is none, the actor."""
        self.given_up = self.given_up or why
        if self._life.done():
            return
        if self.pid is None:
            self._kill()
            return
        self._actor.end_at_once()
        self._kill_in(_ENDING_S)

    async def end(self, patience_s: float) -> None:
        """Let it answer whom it has for so long, and end it."""
        if self.pid is None:
            self.end_at_once("It was ended before it ran.")
        elif not self._life.done():
            self._actor.end(patience_s)
            self._kill_in(patience_s + PATIENCE_S + _ENDING_S)
        await self.ended()

    def _kill_in(self, seconds: float) -> None:
        self._ends.add(asyncio.get_running_loop().call_later(seconds, self._kill))

    def _kill(self) -> None:
        """End the actor; one of which Ray tells nothing then, as it couldn't be told, is lost."""
        self._actor.kill()
        self._ends.add(asyncio.get_running_loop().call_later(_LEAVING_S, self._leave))

    def _leave(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def _unless_over(self, asked: Awaitable[T]) -> T:
        """What the actor answers. Raises LostError where it is no longer waited for."""
        answer = asyncio.ensure_future(asked)
        try:
            both: set[asyncio.Future[Any]] = {answer, self._over}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise LostError(f"Ray hasn't told of its end within {_LEAVING_S:g} s.")
        finally:
            answer.cancel()

    async def _live(self) -> int:
        watch = asyncio.create_task(self._watch())
        try:
            node = await self._unless_over(self._actor.place())
            watch.cancel()
            self.lack = ""
            fields = {"worker": self._order.name, "node": node}
            logger.info("placed", extra={"fields": fields})
            started = await self._unless_over(self._actor.start(self._order))
            self.pid = started.pid
            self._address.set_result(Address(started.url, self._order.key))
            while True:
                lines, code = await self._unless_over(self._actor.said())
                for line in lines:
                    self._said.add(line)
                if code is not None:
                    return code
        except LostError as error:
            self.given_up = self.given_up or str(error)
            return _LOST
        except ConfigError as error:
            self.given_up = self.given_up or str(error)
            return _CANNOT
        finally:
            watch.cancel()
            for handle in self._ends:
                handle.cancel()
            self._actor.kill()

    async def _watch(self) -> None:
        """See what it lacks, as long as it isn't anywhere."""
        while True:
            await asyncio.sleep(_LACKING_S)
            try:
                lack = self._needs.lack(await self._cluster.nodes())
            except Exception:  # Ray's own, of any kind: ask again
                logger.exception("an internal error")
                continue
            if lack and lack != self.lack:
                fields = {"worker": self._order.name, "why": lack}
                logger.warning("resources lack", extra={"fields": fields})
            self.lack = lack


class RemoteWorker(OwnWorker):
    """An instance on Ray: started again, elsewhere where need be, when it has ended."""

    def __init__(
        self,
        name: str,
        model: str,
        arguments: Sequence[str],
        cluster: Cluster,
        needs: Needs,
        start_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(name, model, "", start_timeout_s, changed)
        self._arguments = arguments
        self._cluster, self._needs = cluster, needs

    async def _start(self) -> RemoteInstance:
        try:
            actor = await self._cluster.actor(self._needs)
        except LostError as error:
            raise OSError(str(error).removesuffix(".")) from error
        return RemoteInstance(self.name, self._arguments, self._cluster, self._needs, actor)

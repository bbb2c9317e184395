"""One request's way: let in, sent to an instance, sent to another where that one breaks."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from penstock.fleet.ask import SAMPLED, Ask
from penstock.fleet.continuing import Continuation, Events, Sent, engine_died
from penstock.fleet.fleet import Fleet
from penstock.fleet.group import Group, Lease
from penstock.fleet.kept import HEADER, Place
from penstock.fleet.link import Exchange, Headers
from penstock.fleet.worker import Worker
from penstock.http1 import ExchangeError
from penstock.server.answers import broken
from penstock.server.errors import ApiError
from penstock.server.keys import Key
from penstock.server.sse import EventStream, last_event

logger = logging.getLogger("penstock.fleet")

_DYING = frozenset(("server_loading", "server_draining", "server_failed", "engine_dead"))
"""Codes of a 503 by which an instance says that it isn't there for anybody."""
_HANDED_ON = ("content-type", "retry-after", "www-authenticate")
_KNOWN = 0.75  # of a prompt, from which the instance that was sent it computes the rest itself
_BRIEF_S = 35.0  # for what takes no step
_OURS = "x-penstock-"  # headers that begin so are handed on too


class Passage:
    """A request that was let in. `close` gives back all that it holds."""

    def __init__(
        self, fleet: Fleet, group: Group, ask: Ask, key: Key, at: str | None = None
    ) -> None:
        """at: the only instance that can answer it, where there is one.

        Raises ApiError 429, and 400 for more than the key may ever have.
        """
        self.group = group
        self._key, self._at = key, at
        self.ask = ask
        self.worker = ""  # that answers
        self.headers: dict[str, str] = {}  # for the answer
        self.attempts = 0
        self._fleet = fleet
        self._lease: Lease | None = None
        self._exchange: Exchange | None = None
        self._tried: set[tuple[str, int]] = set()
        self._started = time.monotonic()
        waiting = sum(x.backlog for x in fleet.everyone)
        recent = fleet.recent_s
        each = sum(recent) / len(recent) if recent else None
        self._samples = ask.samples
        self._prompts = ask.prompts
        self._account = fleet.gate.admit(key, self._prompts, self._samples, waiting, each)
        fleet.running += 1
        self._open = True

    def close(self) -> None:
        """It has been answered, whatever became of it."""
        if not self._open:
            return
        self._open = False
        self._let_go()
        for _ in range(self._prompts):
            self._account.settle(0, self._samples)
        self._fleet.running -= 1
        self._fleet.recent_s.append(time.monotonic() - self._started)

    def _let_go(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        if self._lease is not None:
            self._lease.close()
        self._exchange = self._lease = None

    @property
    def _deadline(self) -> float | None:
        limit = self._fleet.config.request_timeout_s
        if limit is None:
            return None
        return asyncio.get_running_loop().time() + self._started + limit - time.monotonic()

    def _too_late(self) -> ApiError:
        limit = self._fleet.config.request_timeout_s
        return ApiError(408, f"The request didn't end within {limit:g} s.", code="request_timeout")

    # ── sending ──────────────────────────────────────────────────────────────────────────────

    async def answer(self) -> Response:
        """The answer: whole, or in events. Raises ApiError."""
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                await self._prefill()
                while True:
                    exchange = await self.begin()
                    kind = exchange.headers.get("content-type", "")
                    self.headers |= _ours(exchange)
                    if (kept := exchange.headers.get(HEADER)) is not None:
                        place = Place(self._key.name, self.group.name, self.worker)
                        self._fleet.kept.put(kept, place)
                    if kind.startswith(EventStream.media_type):
                        return EventStream(self._events(exchange), self._explain)
                    try:
                        body = await exchange.whole()
                    except ExchangeError as failure:
                        self._broke(failure)
                        continue
                    self.count(str(exchange.status))
                    return Response(body, exchange.status, headers=_handed_on(exchange))
        except TimeoutError as error:
            raise self._too_late() if limit.expired() else error from None

    async def _prefill(self) -> None:
        """Have the prompt computed elsewhere, where that is worth it and somebody does so.

        What can't be is left to the instance that answers: it computes what it doesn't find.
        """
        by, ask, group = self.group.prefill, self.ask, self.group
        if by is None or not by.has_room or ask.size < group.config.least_prefill:
            return
        if not ask.may_be_handed_over or ask.model not in (None, group.name):  # an adapter
            return
        if group.chooser.knows(group.ready, ask) >= _KNOWN:
            return
        one = ask.prefill()
        lease = self._lease = await by.lease(one, set())
        outcome = "left"
        try:
            exchange = await lease.worker.link.request("POST", one.path, one.headers, one.body)
            self._exchange = exchange
            said = await exchange.whole()
            outcome = str(exchange.status)
            if exchange.status != 200:
                by.complain(lease.worker, exchange.status, _message(said))
        except ExchangeError as failure:
            outcome = "broken"
            lease.worker.broke(str(failure))
        finally:
            self._fleet.metrics.prefilled(group.name, outcome)
            self._let_go()

    async def begin(self) -> Exchange:
        """The head of the answer of an instance that takes the request. Raises ApiError."""
        while True:
            self._let_go()
            self.attempts += 1
            if self._at is None:
                lease = self._lease = await self.group.lease(self.ask, self._tried)
            else:
                lease = self._lease = self.group.lease_at(self._at, self.ask)
            self.worker = self.headers["X-Penstock-Worker"] = lease.worker.name
            try:
                exchange = await lease.worker.link.request(
                    "POST", self.ask.path, self.ask.headers, self.ask.body
                )
                self._exchange = exchange
                if exchange.status != 503:
                    return exchange
                body = await exchange.whole()
                code = exchange.headers.get("x-penstock-code")
                if code not in _DYING:
                    self.count("503")
                    raise _said(exchange, body)
                self._broke(ExchangeError(str(code), _message(body)))
            except ExchangeError as failure:
                self._broke(failure)

    def _broke(self, failure: ExchangeError) -> None:
        """The instance won't answer. Raises ApiError 502 where no other is to be asked."""
        assert self._lease is not None
        lease = self._lease
        self._tried.add((lease.worker.name, lease.life))
        if lease.life == lease.worker.starts:
            lease.worker.broke(str(failure))
        self.count("broken")
        name = dict(self.ask.headers).get("x-request-id")
        fields = {"request_id": name, "worker": self.worker, "attempt": self.attempts}
        logger.warning("broken", extra={"fields": fields | {"why": str(failure)}})
        if self.attempts >= self._fleet.fleet_config.max_attempts:
            raise ApiError(
                502,
                f"{self.attempts} instances of {self.group.name!r} broke while they answered; the "
                f"last, {self.worker}: {failure}",
                code="worker_lost",
            ) from failure

    def count(self, outcome: str) -> None:
        """Enter what an instance answered."""
        self._fleet.metrics.asked(self.group.name, self.worker, outcome)

    # ── streams ──────────────────────────────────────────────────────────────────────────────

    async def _events(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """Whole events as they come; those of another instance where this one breaks."""
        sent, goes_on = Sent(), self.ask.path in SAMPLED
        continuation: Continuation | None = None
        while True:
            try:
                async for events in self._whole_events(exchange):
                    new = events if continuation is None else continuation.filter(events)
                    if new:
                        if goes_on:
                            sent.add(new)
                        yield new
                self.count("200")
                return
            except ExchangeError as failure:
                if sent.ended:  # all was said
                    return
                self._broke(failure)
                if not goes_on:
                    raise ApiError(
                        502,
                        f"{self.worker} broke in the middle of its answer: {failure} "
                        "Answers of this API aren't gone on with. Send the request again.",
                        code="worker_lost",
                    ) from failure
                continuation = sent.continuation()
                exchange = await self._again()
                self._fleet.metrics.continued(self.group.name)

    async def _again(self) -> Exchange:
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                exchange = await self.begin()
        except TimeoutError as error:
            raise self._too_late() if limit.expired() else error from None
        if exchange.headers.get("content-type", "").startswith(EventStream.media_type):
            return exchange
        raise _said(exchange, await exchange.whole())

    async def _whole_events(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """Raises ExchangeError where they break off, also by the word of an engine that stopped."""
        events, deadline = Events(), self._deadline
        pieces = exchange.body()
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline) as limit:
                        piece = await anext(pieces, b"")
                except TimeoutError as error:
                    raise self._too_late() if limit.expired() else error from None
                if not piece:
                    if events.rest:
                        raise ExchangeError(
                            "malformed answer", f"{self.worker} ended in the middle of an event."
                        )
                    return
                whole = events.feed(piece)
                if engine_died(whole):
                    raise ExchangeError("engine_dead", f"The engine of {self.worker} has stopped.")
                if whole:
                    yield whole
        finally:
            with suppress(ExchangeError):
                await pieces.aclose()

    def _explain(self, error: Exception) -> bytes:
        """The last event of an answer that can't be gone on with."""
        return last_event(self.ask.path, broken(error))


async def passed_on(worker: Worker, method: str, target: str, headers: Headers) -> Response:
    """A worker's answer to what is no request to its model. Raises ApiError 502."""
    try:
        async with asyncio.timeout(_BRIEF_S):
            exchange = await worker.link.request(method, target, headers, b"")
            try:
                body = await exchange.whole()
            finally:
                exchange.close()
    except (ExchangeError, TimeoutError) as failure:
        said = str(failure) or f"{worker.name} said nothing within {_BRIEF_S:g} s."
        raise ApiError(502, said, code="worker_lost") from failure
    told = _handed_on(exchange) | _ours(exchange) | {"x-penstock-worker": worker.name}
    return Response(body, exchange.status, headers=told)


async def watch(worker: Worker, ends: Callable[[], bool]) -> tuple[Exchange, Response]:
    """A worker's events for the page, until it ends, the fleet does, or the caller leaves.

    They are no request: nobody waits for them. The exchange is to be closed with the answer.
    Raises ApiError 502.
    """
    try:
        exchange = await worker.link.request("GET", "/page/events", (), b"")
    except ExchangeError as failure:
        raise ApiError(502, str(failure), code="worker_lost") from failure

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async for piece in exchange.body():
                if ends():
                    return
                yield piece
        except ExchangeError:
            return  # the page asks again

    if exchange.status != 200:
        raise _said(exchange, await exchange.whole())
    return exchange, EventStream(events(), lambda error: b"")


def _handed_on(exchange: Exchange) -> dict[str, str]:
    return {k: v for k, v in exchange.headers.items() if k in _HANDED_ON}


def _ours(exchange: Exchange) -> dict[str, str]:
    return {k: v for k, v in exchange.headers.items() if k.startswith(_OURS)}


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}


def _code(body: bytes) -> str | None:
    error = _parsed(body)
    found = error.get("code")
    return found if isinstance(found, str) else None


def _message(body: bytes) -> str:
    return str(_parsed(body).get("message", "It said nothing."))


def _said(exchange: Exchange, body: bytes) -> ApiError:
    """An instance's refusal, for the caller."""
    headers = _handed_on(exchange)
    headers.pop("content-type", None)
    code = _code(body) or exchange.headers.get("x-penstock-code")  # Anthropic's shape has none
    return ApiError(exchange.status, _message(body), code=code, headers=headers)

"""How each HTTP request was answered: always counted, and a line of the log where nobody else
writes one.

The engine's accounting (`Service`) writes the line of a request that reached it. This is for all
the others: those that were refused, and those that need no engine.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.routing import BaseRoute, Match

from penstock.server.errors import ApiError, as_api_error
from penstock.server.logs import shortened
from penstock.server.sse import CLIENT_CLOSED, Message

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig

logger = logging.getLogger("penstock.server")

OTHER = "other"
"""What a path that no route takes is called in metrics, whose labels must not grow."""

POLLED = frozenset(
    ("/", "/health", "/load", "/metrics", "/page/events", "/page/{name}", "/ready")
)  # fmt: skip
"""Endpoints that machines ask all the time: a GET that goes well isn't logged, and of those that
are told that there is no service (503) the first."""


class Polls:
    """Which polled endpoints said last that there is no service."""

    def __init__(self) -> None:
        self._away: set[str] = set()

    def is_news(self, endpoint: str, status: int) -> bool:
        """Whether an answer's status tells more than the one before, where machines ask."""
        if endpoint not in POLLED or (status >= 400 and status != 503):
            return True
        was_away, is_away = endpoint in self._away, status == 503
        (self._away.add if is_away else self._away.discard)(endpoint)
        return is_away and not was_away


class Counts(Protocol):
    """Who counts answers."""

    def answered(self, endpoint: str, status: int, error: ApiError | None) -> None:
        """Count an HTTP request. endpoint: its route, as declared; error: what it was told."""


class Answering(Protocol):
    """What stands behind an application: a model's service, or a fleet."""

    config: ServerConfig

    @property
    def metrics(self) -> Counts:
        """Where answers are counted."""


PROBE = (b"user-agent", b"penstock-fleet")
"""How a fleet asks its instances how they are; it says itself what it finds."""


@dataclass(slots=True)
class Answer:
    """One HTTP request's. `current` is that of the task's request."""

    request_id: str
    method: str  # as it was sent
    start: float = field(default_factory=time.perf_counter)
    status: int = CLIENT_CLOSED  # until something is sent
    accounted: bool = False  # the engine's accounting has written a line
    failure: ApiError | None = None  # that broke it off, after its status was sent
    unheeded: list[str] = field(default_factory=list)  # what the request asks for in vain

    def end(self, scope: Message, key_name: str | None, polls: Polls) -> None:
        """Count it, and log it unless that has been done. key_name: None without a valid key."""
        service: Answering = scope["app"].state.service
        endpoint = template(scope)
        error: ApiError | None = scope["state"].get("error")
        service.metrics.answered(endpoint, self.status, error)
        asked = scope["method"] == "GET"
        probed = asked and PROBE in scope["headers"] and self.status in (200, 503)
        polled = probed or (asked and not polls.is_news(endpoint, self.status))
        if service.config.log_requests and not (self.accounted or polled):
            logger.info("answered", extra={"fields": self._fields(scope, key_name, error)})

    def _fields(
        self, scope: Message, key_name: str | None, error: ApiError | None
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "endpoint": shortened(scope["path"]),
            "key": key_name,
            "status": self.status,
            "seconds": round(time.perf_counter() - self.start, 4),
        }
        worker = scope["state"].get("answer_headers", {}).get("X-Penstock-Worker")
        if worker is not None:  # a fleet's, whose own line says more
            fields["worker"] = worker
        error = error or self.failure
        if self.unheeded:
            fields["unheeded"] = ", ".join(self.unheeded)
        if error is not None:
            fields |= {"code": error.code, "error": shortened(error.message)}
        return fields


@dataclass(frozen=True, slots=True)
class Unread:
    """What was refused before it was a request."""

    service: Answering

    def told(self, error: ApiError) -> None:
        """Count it, and log it."""
        self.service.metrics.answered(OTHER, error.status, error)
        if self.service.config.log_requests:
            fields = {"status": error.status, "error": shortened(error.message)}
            logger.info("answered", extra={"fields": fields})


current: ContextVar[Answer | None] = ContextVar("answer", default=None)


def accounted() -> None:
    """The engine's accounting has written what there is to say of the current request."""
    answer = current.get()
    if answer is not None:
        answer.accounted = True


def unheeded(name: str) -> None:
    """The current request asks for something by `name` that its answer does without.

    Clients send such hints by themselves, so refusing them would refuse the client. The answer's
    header and the log say which they were.
    """
    answer = current.get()
    if answer is not None and name not in answer.unheeded:
        answer.unheeded.append(name)


def all_unheeded() -> str:
    """Of the current request, for a log."""
    answer = current.get()
    return "" if answer is None else ", ".join(answer.unheeded)


def broken(error: Exception) -> ApiError:
    """What a client is told of an error in the middle of its answer, which is the end of it."""
    told = as_api_error(error)
    answer = current.get()
    if answer is not None:
        answer.failure = told
    return told


def broken_by() -> ApiError | None:
    """What broke the current request's answer off."""
    answer = current.get()
    return None if answer is None else answer.failure


def template(scope: Message) -> str:
    """The path of the route that takes a request, as it is declared; `OTHER` where none does."""
    route = scope.get("route")
    if route is None:  # refused before it was looked for, or there is none
        routes: list[BaseRoute] = scope["app"].state.routes
        route = next((x for x in routes if x.matches(scope)[0] is not Match.NONE), None)
    return str(getattr(route, "path", OTHER))

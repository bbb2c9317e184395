"""A request's way from its arrival to the engine: counted first, then made into a prompt.

Making a prompt takes from microseconds to seconds, so it happens beside the event loop, in lanes by
the size of what was sent: short requests never wait behind long ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from penstock.server.errors import ApiError
from penstock.server.keys import Key
from penstock.server.limits import Account
from penstock.server.sse import Receive, unless_gone

T = TypeVar("T")

_LANES = ((1 << 15, 2), (1 << 19, 1), (1 << 62, 1))
"""(bytes of a body up to which a lane takes it, its threads)."""


@dataclass(slots=True)
class Caller:
    """Who sent a request, and what it is called in answers, logs and traces."""

    key: Key
    request_id: str
    endpoint: str
    traceparent: str | None = None
    user: str | None = None


class Ticket:
    """What a request holds from its arrival to its end: places of the queue, and of its key.

    Each of its prompts is settled when it ends; `close` settles those that never ran.
    """

    def __init__(
        self,
        caller: Caller,
        account: Account,
        inflight: dict[str, Caller],
        prompts: int,
        samples: int,
        size: int,
        timeout_s: float | None,
        receive: Receive,
    ) -> None:
        """samples: of each prompt; size: bytes of the body; timeout_s: to the end of it all.

        receive: tells when the client has gone.
        """
        self.receive = receive
        self.caller = caller
        self.arrival = time.monotonic()
        self.start = time.time()  # the same in unix seconds
        self.size = size
        self.names = [
            caller.request_id if i == 0 else f"{caller.request_id}-{i}" for i in range(prompts)
        ]
        self._account = account
        self._samples = samples
        self._inflight = inflight
        self._timeout_s = timeout_s
        self._beside = 0  # prompts
        inflight.update(dict.fromkeys(self.names, caller))

    @property
    def left_s(self) -> float | None:
        """Until its time is over; None: it has as much as it wants."""
        if self._timeout_s is None:
            return None
        return max(self.arrival + self._timeout_s - time.monotonic(), 1e-3)

    def too_late(self) -> ApiError:
        """408."""
        return ApiError(
            408, f"The request didn't end within {self._timeout_s:g} s.", code="request_timeout"
        )

    def settle(self, name: str, tokens: int = 0) -> None:
        """The prompt called `name` has ended, having used so many tokens; once.

        One beside the request's own (`beside`) holds no place, so only its tokens count.
        """
        if self._inflight.pop(name, None) is not None:
            self._account.settle(tokens, self._samples)
        elif not self.owns(name):
            self._account.settle(tokens, 0)

    def beside(self) -> str:
        """A name for a prompt beside the request's own."""
        self._beside += 1
        return f"{self.caller.request_id}-summary-{self._beside}"

    def owns(self, name: str) -> bool:
        """Whether a prompt is one of the request's own."""
        return name in self.names

    def close(self) -> None:
        """The request has been answered, whatever became of it."""
        for name in self.names:
            self.settle(name)


class Lanes:
    """Threads in which prompts are made."""

    def __init__(self) -> None:
        self._lanes = [
            (size, ThreadPoolExecutor(threads, "penstock-prompts")) for size, threads in _LANES
        ]

    async def run(self, ticket: Ticket, work: Callable[[], T], *, slow: bool = False) -> T:
        """What `work` returns, beside the event loop. Raises ApiError 408 when time is over.

        ApiError 499 when the client has gone. slow: however short the body is, it may take long.
        """
        lane = next(
            lane for size, lane in self._lanes[1 if slow else 0 :] if ticket.size <= size
        )  # fmt: skip

        async def made() -> T:  # given up before it began where the client has gone
            return await asyncio.get_running_loop().run_in_executor(lane, work)

        try:
            async with asyncio.timeout(ticket.left_s) as limit:
                return await unless_gone(ticket.receive, made())
        except TimeoutError as error:
            raise ticket.too_late() if limit.expired() else error from None

    def close(self) -> None:
        """Begin nothing more."""
        for _, lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)

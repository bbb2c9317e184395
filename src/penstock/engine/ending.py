"""How requests end: done, stopped by their caller, or failed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.engine.adapting import give_back_adapter
from penstock.engine.intake import Intake
from penstock.engine.request import Request, Sequence, Status
from penstock.engine.scheduler import Scheduler
from penstock.runtime import Runtime

logger = logging.getLogger("penstock")


class Ending:
    """Ends sequences, and a request with the last of its own: then it is out of `requests`."""

    def __init__(
        self,
        requests: dict[str, Request],
        runtime: Runtime,
        scheduler: Scheduler,
        intake: Intake,
        clock: Callable[[], float],
        forget: Callable[[Sequence], None],
    ) -> None:
        """forget: called with each sequence that ends, for others that keep something of it."""
        self._requests = requests
        self._runtime = runtime
        self._scheduler = scheduler
        self._intake = intake
        self._clock = clock
        self._forget = forget

    def finish(self, sequence: Sequence, reason: str, stop: int | str | None = None) -> None:
        """End one sequence, and free what it holds."""
        request = sequence.request
        sequence.finish_reason, sequence.stop_reason = reason, stop
        self._scheduler.finish(sequence)
        if sequence.shadow is not None:
            self._scheduler.finish(sequence.shadow)
        self._forget(sequence)
        request.live -= 1
        if request.finished:
            request.metrics.finished_time = self._clock()
            give_back_adapter(self._runtime, request)
            del self._requests[request.request_id]
        if sequence.detokenizer is not None and request.error is None:
            sequence.detokenizer.finish()

    def end(self, request: Request, reason: str) -> None:
        """Finish every sequence that hasn't yet, for one reason."""
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self.finish(sequence, reason)

    def fail(self, request: Request, error: Exception) -> Request:
        """End a request, or the one that it guides; returns which."""
        request = request.guides or request
        adapter = None if request.adapter is None else request.adapter.name
        error = self._intake.explained(error, adapter)
        # its output has the error too, by which a command tells of it
        logger.warning("Request %s failed: %s", request.request_id, error, extra={"told": True})
        request.error = error
        self.end(request, "error")
        return request

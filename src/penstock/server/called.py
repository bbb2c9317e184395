"""What is said of calls that models have made: whether their arguments follow the tools' schemas.

Nobody waits for it: a thread of its own looks at each call once it is whole, and the answer has
been sent meanwhile.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from penstock.server.logs import shortened
from penstock.server.tools.offer import Function
from penstock.server.tools.verdict import Verdict, judge

if TYPE_CHECKING:
    from penstock.server.metrics import Metrics

logger = logging.getLogger("penstock.server")

_MOST_WAITING = 1024
_WORDS = {True: "true", False: "false", None: "unknown"}


class Called:
    """Counts calls, and warns of those that don't follow their schemas."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "penstock-tool-calls")
        self._lock = Lock()
        self._waiting = 0

    def check(self, request_id: str, function: Function, arguments: str) -> None:
        """A call is whole. Where too many wait to be looked at, this one isn't."""
        with self._lock:
            taken = self._waiting < _MOST_WAITING
            self._waiting += taken
        if taken:
            try:
                self._thread.submit(self._look, request_id, function, arguments)
            except RuntimeError:  # the server is stopping
                with self._lock:
                    self._waiting -= 1
                taken = False
        if not taken:
            self._metrics.called(_WORDS[None])

    def _look(self, request_id: str, function: Function, arguments: str) -> None:
        verdict = Verdict(None)
        try:
            verdict = judge(function.schema, arguments)
        except Exception:
            logger.exception("a tool call couldn't be looked at")
        with self._lock:
            self._waiting -= 1
        self._metrics.called(_WORDS[verdict.valid])
        if verdict.valid is False:
            place = f"arguments.{verdict.where}".rstrip(".")
            fields = {
                "request_id": request_id,
                "tool": function.name,
                "place": shortened(place),
                "keyword": verdict.why,
            }
            logger.warning("tool call doesn't follow its schema", extra={"fields": fields})

    def close(self) -> None:
        """Look at nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

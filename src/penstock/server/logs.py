"""The server's log: a line for each event, as text or as JSON. No prompt's text unless asked."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

MAX_TEXT = 256
"""Characters of a text that a client chose, in a line of the log or in a trace."""
_MAX_MESSAGE = 2048  # which may quote a client, and is ours otherwise
_MAX_TRACEBACK = 16_384
_EXPORT_PERIOD_S = 60.0  # between two lines of OpenTelemetry that are alike


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """`text`, or its beginning and an ellipsis: at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


class LineFormatter(logging.Formatter):
    """`2026-11-21T22:03:33.123+00:00 info request key=value …`; the time is local."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).astimezone()
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = _one_line(shortened(record.getMessage(), _MAX_MESSAGE))
        said = [moment.isoformat(timespec="milliseconds"), record.levelname.lower(), message]
        said += [f"{name}={_plain(value)}" for name, value in fields.items()]
        text = " ".join(said)
        return f"{text}\n{_traceback(self, record)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line; its time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage(), _MAX_MESSAGE),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = _traceback(self, record)
        return json.dumps(line, default=str)  # ASCII: nothing in it moves a terminal


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Its beginning and its end: the exception may quote a client at length."""
    assert record.exc_info  # the callers asked
    text, half = formatter.formatException(record.exc_info), _MAX_TRACEBACK // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n…\n{text[-half:]}"


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _plain(value: object) -> str:
    """One word, so that a text can't forge lines or fields of the log."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value or '""'
    return json.dumps(value, default=str)


class Sparse(logging.Filter):
    """Lets one line a period pass of each logger and level; it says how many were held back."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._period_s = period_s
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # last passed, held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is time for another."""
        kind, now = (record.name, record.levelno), self._clock()
        passed, held = self._seen.get(kind, (-self._period_s, 0))
        if now - passed < self._period_s:
            self._seen[kind] = (passed, held + 1)
            return False
        self._seen[kind] = (now, 0)
        if held:
            record.fields = {**getattr(record, "fields", {}), "held_back": held}
        return True


def configure(kind: Literal["text", "json"], level: int = logging.INFO) -> None:
    """Write the log to stderr: Penstock's, the web server's, and what OpenTelemetry warns of.

    An exporter whose collector is away warns with every batch: one line a minute is enough.
    """
    formatter = JsonFormatter() if kind == "json" else LineFormatter()
    handler, sparse = (logging.StreamHandler(sys.stderr) for _ in range(2))
    sparse.addFilter(Sparse(_EXPORT_PERIOD_S))
    for one in (handler, sparse):
        one.setFormatter(formatter)
    for name, its_handler, its_level in (
        ("penstock", handler, level),
        ("uvicorn.error", handler, level),
        ("opentelemetry", sparse, max(level, logging.WARNING)),
    ):
        chosen = logging.getLogger(name)
        chosen.handlers = [its_handler]
        chosen.propagate = False
        chosen.setLevel(its_level)

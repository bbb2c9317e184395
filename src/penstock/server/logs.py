"""The server's log: a line for each event, as text or as JSON. No prompt's text unless asked."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

# What ends a line, or moves a terminal's cursor, and isn't escaped by `json`.


class LineFormatter(logging.Formatter):
    """`12:30:01 info penstock.server request key=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        said = [stamp, record.levelname.lower(), _one_line(record.getMessage())]
        said += [f"{name}={_plain(value)}" for name, value in fields.items()]
        text = " ".join(said)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: nothing in it moves a terminal


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _plain(value: object) -> str:
    """One word, so that a text can't forge lines or fields of the log."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value or '""'
    return json.dumps(value, default=str)


def configure(kind: Literal["text", "json"], level: int = logging.INFO) -> None:
    """Write the log to stderr, Penstock's and the web server's alike."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else LineFormatter())
    for name in ("penstock", "uvicorn.error"):
        chosen = logging.getLogger(name)
        chosen.handlers = [handler]
        chosen.propagate = False
        chosen.setLevel(level)

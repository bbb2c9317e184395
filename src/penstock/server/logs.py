"""The server's log: a line for each event, as text or as JSON. No prompt's text unless asked."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, Literal

# What ends a line, or moves a terminal's cursor, and isn't escaped by `json`.
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """`12:30:01 info penstock.server request key=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        said = [stamp, record.levelname.lower(), _line(record.getMessage())]
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
        text = json.dumps(line, ensure_ascii=False, default=str)
        return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _line(message: str) -> str:
    """One line, whatever was put into it."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def _plain(value: object) -> str:
    """One word, so that a text can't forge lines or fields of the log."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=True, default=str)


def configure(kind: Literal["text", "json"], level: int = logging.INFO) -> None:
    """Write the log to stderr, Penstock's and the web server's alike."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else LineFormatter())
    for name in ("penstock", "uvicorn.error"):
        chosen = logging.getLogger(name)
        chosen.handlers = [handler]
        chosen.propagate = False
        chosen.setLevel(level)

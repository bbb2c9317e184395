"""What a command says beside its result: one line each, on stderr."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings

import typer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tab and newline


def debugging() -> bool:
    """Whether PENSTOCK_DEBUG asks for tracebacks and detailed logs."""
    return os.environ.get("PENSTOCK_DEBUG", "0") not in ("", "0")


def printable(text: str) -> str:
    """`text` as a terminal may show it: what a model writes must not move its cursor."""
    return _CONTROL.sub("\ufffd", text)


def one_line(text: object) -> str:
    """`text` without line breaks or characters that a terminal would act on."""
    return printable(" ".join(str(text).split()))


def _say(text: str, color: str | None) -> None:
    if color is None or os.environ.get("NO_COLOR"):
        typer.echo(text, err=True)
    else:
        typer.secho(text, fg=color, err=True)


def error(message: object) -> None:
    """The one line that tells why a command failed."""
    _say(f"error: {one_line(message)}", "red")


def warning(message: object) -> None:
    """Something is off, and the command goes on."""
    _say(f"warning: {one_line(message)}", "yellow")


def note(message: object) -> None:
    """A word about what is happening."""
    _say(one_line(message), None)


def is_terminal(stream: object = None) -> bool:
    """Whether somebody is watching `stream` (stderr where none is given)."""
    isatty = getattr(sys.stderr if stream is None else stream, "isatty", None)
    return bool(isatty is not None and isatty())


class _Lines(logging.Handler):
    """Shows log records as warnings and notes, but what a command tells of by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "told", False) and not debugging():
            return
        show = warning if record.levelno >= logging.WARNING else note
        show(record.getMessage())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Python's, without the place in the code that gave it."""
    warning(str(message))


def show_logs() -> None:
    """Show Penstock's warnings as lines of this command; everything when debugging."""
    if not debugging():
        warnings.showwarning = _show_warning
    logger = logging.getLogger("penstock")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
    logger.setLevel(logging.DEBUG if debugging() else logging.WARNING)

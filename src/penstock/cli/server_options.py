"""Options of whatever listens: a server of one model, or a fleet."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.errors import ConfigError, MissingExtraError, get_extra

if TYPE_CHECKING:
    from penstock.server import Key, Limits

HOST, PORT = "127.0.0.1", 8000
KEY_VARIABLE = "PENSTOCK_API_KEY"
_SERVER, _SECURITY, _LIMITS, _LOGS = "Server", "Security", "Limits", "Logs"
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
T = TypeVar("T")

# What the configuration calls an option, where its messages name it.
NAMES = {
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "max_queue_size": "--max-queue-size",
    "max_body_bytes": "--max-body-size",
    "body_timeout_s": "--body-timeout",
    "request_timeout_s": "--request-timeout",
    "write_timeout_s": "--write-timeout",
    "shutdown_timeout_s": "--shutdown-timeout",
    "requests_per_minute": "--requests-per-minute",
    "tokens_per_minute": "--tokens-per-minute",
    "max_concurrency": "--max-concurrency",
    "^uds": "--uds",
    "^port": "--port",
    "^host=": "--host ",
}


def option(*names: str, help: str, panel: str) -> Any:  # noqa: A002
    """One of a panel of --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How it listens, whom it lets in, what of them it takes on, and its log."""

    host: Annotated[str, option(help="Address to listen on.", panel=_SERVER)] = HOST
    port: Annotated[int, option(help="Port; 0 is any free one.", panel=_SERVER)] = PORT
    uds: Annotated[
        str | None,
        option(help="A Unix socket's path, instead of an address and a port.", panel=_SERVER),
    ] = None
    shutdown_timeout: Annotated[
        float, option(help="Seconds for running requests after SIGTERM.", panel=_SERVER)
    ] = 60.0
    page: Annotated[bool, option("--page/--no-page", help="The page at /.", panel=_SERVER)] = True
    api_key: Annotated[
        list[str] | None,
        option(
            help=f"Who knows one is let in; may be repeated. Or {KEY_VARIABLE}.", panel=_SECURITY
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(help="TOML with a table \\[\\[key]] each: name, sha256, limits.", panel=_SECURITY),
    ] = None
    allow_unauthenticated: Annotated[
        bool,
        option(
            "--allow-unauthenticated",
            help="Listen beyond this machine without a key.",
            panel=_SECURITY,
        ),
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        option(help="Host headers that are answered; may be repeated.", panel=_SECURITY),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        option(
            "--allowed-origin",
            "--allowed-origins",
            help="Web sites whose scripts may call (CORS); may be repeated. * is all.",
            panel=_SECURITY,
        ),
    ] = None
    max_queue_size: Annotated[
        int, option(help="Requests that may wait; beyond, 429.", panel=_LIMITS)
    ] = 2048
    requests_per_minute: Annotated[int | None, option(help="Of each key.", panel=_LIMITS)] = None
    tokens_per_minute: Annotated[
        int | None, option(help="Of each key: prompts and answers.", panel=_LIMITS)
    ] = None
    max_concurrency: Annotated[
        int | None, option(help="Requests of each key at once.", panel=_LIMITS)
    ] = None
    request_timeout: Annotated[
        float | None, option(help="Seconds to a request's end; 408.", panel=_LIMITS)
    ] = None
    max_body_size: Annotated[int, option(help="Bytes of a request's body; 413.", panel=_LIMITS)] = (
        32 << 20
    )
    write_timeout: Annotated[
        float, option(help="Seconds for a client to read what was sent.", panel=_LIMITS)
    ] = 60.0
    body_timeout: Annotated[
        float, option(help="Seconds for a request's headers, and then its body.", panel=_LIMITS)
    ] = 30.0
    log_format: Annotated[str, option(help="text or json.", panel=_LOGS)] = "text"
    log_requests: Annotated[
        bool, option("--log-requests/--no-log-requests", help="A line each.", panel=_LOGS)
    ] = True

    def chosen(self) -> dict[str, Any]:
        """As arguments of a `ServerConfig`. Raises ConfigError."""
        from penstock.server import Limits

        rates = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrency)
        limits = named(NAMES, Limits, *rates)
        one_of("--log-format", self.log_format, "text", "json")
        if self.uds is not None and (self.host, self.port) != (HOST, PORT):
            raise ConfigError(
                "--uds is given, so nothing listens on --host and --port. Leave one out."
            )
        return {
            "host": self.host,
            "port": self.port,
            "uds": self.uds,
            "page": self.page,
            "keys": _keys(self.api_key, self.api_key_file, limits),
            "limits": limits,
            "allow_unauthenticated": self.allow_unauthenticated,
            "allowed_hosts": tuple(name.lower() for name in self.allowed_host or ()),
            "allowed_origins": tuple(self.allowed_origin or ()),
            "max_queue_size": self.max_queue_size,
            "max_body_bytes": self.max_body_size,
            "request_timeout_s": self.request_timeout,
            "write_timeout_s": self.write_timeout,
            "body_timeout_s": self.body_timeout,
            "shutdown_timeout_s": self.shutdown_timeout,
            "log_requests": self.log_requests,
            "log_format": "json" if self.log_format == "json" else "text",
        }


FRONT = FrontOptions()


def named(names: Mapping[str, str], make: Callable[..., T], *values: Any, **fields: Any) -> T:
    """What `make` makes. Raises ConfigError in the words of the command line."""
    try:
        return make(*values, **fields)
    except ConfigError as error:
        message = str(error)
        for field, said in names.items():
            message = re.sub(rf"\b{field}\b", said, message)
        raise ConfigError(message) from error


def check_extra() -> None:
    """Raises MissingExtraError where a server's packages aren't installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"The server needs {', '.join(missing)}; {get_extra('server')}.")


def one_of(name: str, value: str, *allowed: str) -> None:
    """Raises ConfigError for another value."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(allowed)}.")


def _keys(texts: list[str] | None, file: Path | None, limits: Limits) -> tuple[Key, ...]:
    from penstock.server import keys_of, read_keys

    variable = os.environ.get(KEY_VARIABLE)
    if variable == "":  # a secret that wasn't set would let everybody in
        raise ConfigError(f"{KEY_VARIABLE} is empty. Unset it, or put the key there.")
    given_texts = texts or ([] if variable is None else [variable])
    found = keys_of(given_texts, limits)
    return tuple(found + (read_keys(file, limits) if file is not None else []))

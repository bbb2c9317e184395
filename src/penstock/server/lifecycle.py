"""Running the server: listen, load, serve, drain, stop."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from penstock.engine import AsyncLLM
from penstock.errors import ConfigError
from penstock.server.answers import Answering, Unread
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from penstock.server.connection import connections
from penstock.server.service import Service

logger = logging.getLogger("penstock.server")

# The engine's thread and the event loop share the interpreter; CPython's 5 ms between two threads'
# turns is as long as several steps of a small model.
SWITCH_INTERVAL_S = 0.0005
_BACKLOG = 2048
_LOADER_S = 1.0  # is waited for a model that is being loaded when the server is told to end


class Drained(Protocol):
    """What a server is in front of, as far as its end goes."""

    config: ServerConfig

    @property
    def running(self) -> int:
        """Requests that were let in and haven't been answered."""

    def drain(self) -> None:
        """Take no more requests."""


class Server(uvicorn.Server):
    """Tells the service when it is asked to end."""

    def __init__(self, config: uvicorn.Config, service: Drained) -> None:
        super().__init__(config)
        self._service = service
        self.interrupted = False  # by Ctrl-C
        self._drained_by: float | None = None  # when who still runs isn't waited for any longer

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end, or can't go on."""
        return self._drained_by is not None or self.should_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: no new requests; a second one doesn't wait for those that run.

        uvicorn's own would send itself the signal again at the end, and so end without an exit
        code, and takes a second SIGTERM for the first.
        """
        running = {"running": self._service.running}
        if self.is_ending:
            logger.warning("not waiting any longer", extra={"fields": running})
            self.force_exit = self.should_exit = True
        else:
            logger.info("shutting down", extra={"fields": running})
            self._drained_by = time.monotonic() + self._service.config.shutdown_timeout_s
        self._service.drain()
        self.interrupted = self.interrupted or sig == signal.SIGINT

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: told so, when nothing runs any more or the time is over.

        Until then the port stays open: who asks meanwhile is answered 503.
        """
        if self._drained_by is not None:
            left = self._drained_by - time.monotonic()
            if left <= 0 or not self._service.running:
                self.config.timeout_graceful_shutdown = max(1, round(left))
                return True
        return await super().on_tick(counter)


def serve(config: ServerConfig, load: Callable[[], tuple[AsyncLLM, str]]) -> None:
    """Serve until SIGTERM or SIGINT. `load` makes the engine, in a thread, and names the model.

    The port is open before that, so that /health and /ready can be asked. Raises what `load`
    raised, ConfigError for a port that is taken, and KeyboardInterrupt after SIGINT.
    """
    app = create_app(config)
    service: Service = app.state.service
    listener = listen(config)
    url = address(listener)  # before the end, which may come while it loads
    server = Server(uvicorn_config(app, config, service), service)
    failures: list[BaseException] = []

    def load_model() -> None:
        try:
            llm, name = load()
            if server.is_ending:  # it was told so while it was loading
                llm.shutdown()
                return
            service.start(llm, name)
        except BaseException as error:  # told to whoever started the server
            failures.append(error)
            service.state = "failed"
            server.should_exit = True
        else:
            chosen = service.tooling.describe()
            logger.info("ready", extra={"fields": {"url": url, **chosen}})

    loader = threading.Thread(target=load_model, name="penstock-load", daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loader.start()
    try:
        server.run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
        close(listener, config)
    if failures:
        raise failures[0]
    if server.force_exit:
        service.stop()  # which uvicorn leaves out then
    loader.join(_LOADER_S)
    if loader.is_alive():
        # Threads of native code that a module's end would take down in the middle of their work.
        logger.info("stopped while the model was being loaded")
        logging.shutdown()
        os._exit(130 if server.interrupted else 0)
    if server.interrupted:
        raise KeyboardInterrupt


def uvicorn_config(app: FastAPI, config: ServerConfig, service: Answering) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=connections(config, Unread(service)),
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
        server_header=False,
        backlog=_BACKLOG,
    )


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens as configured. Raises ConfigError where that can't be."""
    if config.uds is not None:
        return _listen_locally(config.uds)
    return _listen(config.host, config.port)


def address(listener: socket.socket) -> str:
    """Where it can be reached, for people."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(listener: socket.socket, config: ServerConfig) -> None:
    """Listen no longer; a Unix socket's file goes as well."""
    listener.close()
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def _listen_locally(path: str) -> socket.socket:
    """A Unix socket that only this user may open. One that nobody listens on any more goes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Can't listen on the Unix socket {path}: {error.strerror or error}. Choose another "
            "--uds, or end the program that has it."
        ) from error
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError where that can't be."""
    bare = host.strip("[]")
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two may bind the same address as long as neither listens.
        listener.listen(_BACKLOG)
    except OSError as error:
        way_out = "Choose another --port, or end the program that has it."
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            way_out = "--host must be an address of this machine."
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"Can't listen on {host}, port {port}: {error.strerror or error}. {way_out}"
        ) from error
    return listener

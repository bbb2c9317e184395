"""Fleets in a thread of this process, and connections that break where a test wants them to."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from penstock.fleet.app import create_fleet_app
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.fleet import Fleet
from penstock.runtime import Runtime
from penstock.server import ServerConfig
from penstock.server.lifecycle import uvicorn_config
from tests.cli.conftest import penstock
from tests.server.conftest import Running as Server
from tests.server.conftest import server, server_runtime


@dataclass(slots=True)
class Running:
    """A fleet and where it is."""

    url: str
    fleet: Fleet
    headers: dict[str, str] = field(default_factory=dict)

    def client(self, **options: Any) -> httpx.Client:
        headers = {**self.headers, **options.pop("headers", {})}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, **options)

    def get(self, path: str) -> Any:
        with self.client() as client:
            return client.get(path).json()

    def text(self, path: str) -> str:
        with self.client() as client:
            return client.get(path).text

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        with self.client(headers=headers) as client:
            return client.post(path, json=body)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events; [DONE] as it is."""
        with self.client() as client, client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [x[6:] for x in answer.iter_lines() if x.startswith("data: ")]
        return [x if x == "[DONE]" else json.loads(x) for x in lines]

    def until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 60) -> dict[str, Any]:
        """What /fleet says, once it is as expected."""
        end = time.monotonic() + seconds
        while not holds(found := self.get("/fleet")):
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds} s: {found}")
            time.sleep(0.05)
        return found

    def model(self, name: str) -> dict[str, Any]:
        return next(x for x in self.get("/fleet")["models"] if x["model"] == name)


@contextmanager
def running(config: FleetConfig, **headers: str) -> Iterator[Running]:
    """A fleet that is up; its models may not be."""
    app = create_fleet_app(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    fleet: Fleet = app.state.service
    one = uvicorn.Server(uvicorn_config(app, config.server, fleet))
    thread = threading.Thread(target=one.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not one.started:
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", fleet, headers)
    finally:
        one.should_exit = True
        thread.join()


def elsewhere(*urls: str, name: str = "stories", **fields: Any) -> ModelConfig:
    return ModelConfig(name, workers=urls, **fields)


def front(**fields: Any) -> ServerConfig:
    return ServerConfig(shutdown_timeout_s=2, **fields)


class Cut:
    """A relay to a server, which breaks answers of the paths in `paths` off.

    after: bytes of each answer's stream that come through; None: all.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self.after: int | None = None
        self.times = 0  # that it has cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            _reset(one)
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._open |= {caller, server}
                state = {"cutting": False, "passed": 0}
                self._start(self._ask, caller, server, state)
                self._start(self._answer, caller, server, state)

    def _ask(self, caller: socket.socket, server: socket.socket, state: dict[str, Any]) -> None:
        with suppress(OSError):
            while data := caller.recv(1 << 16):
                if data.startswith(b"POST"):
                    state.update(cutting=self.after is not None, passed=0)
                server.sendall(data)
        _reset(server)

    def _answer(self, caller: socket.socket, server: socket.socket, state: dict[str, Any]) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                state["passed"] += len(data)
                over = state["passed"] - (self.after or 0)
                if state["cutting"] and self.after is not None and over > 0:
                    caller.sendall(data[: len(data) - over])
                    self.times += 1
                    time.sleep(0.02)  # so that it has arrived: a reset takes it along
                    break
                caller.sendall(data)
        _reset(caller)
        _reset(server)


def _reset(one: socket.socket) -> None:
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@dataclass(slots=True)
class Pair:
    """A fleet of one model at two addresses; the first is a relay that breaks answers off."""

    fleet: Running
    cut: Cut
    server: Server


@pytest.fixture(scope="session")
def pair(server: Server) -> Iterator[Pair]:
    with ExitStack() as stack:
        cut = Cut(server.url)
        stack.callback(cut.close)
        config = FleetConfig((elsewhere(cut.url, server.url),), front(), policy="round_robin")
        one = stack.enter_context(running(config))
        one.until(lambda x: [w["state"] for w in x["models"][0]["workers"]] == ["ready"] * 2)
        yield Pair(one, cut, server)


@pytest.fixture(autouse=True)
def logs_are_pytests() -> Iterator[None]:
    """Whatever a command that ran in this process before has set up."""
    one = logging.getLogger("penstock")
    before = one.handlers, one.propagate
    one.handlers, one.propagate = [], True
    yield
    one.handlers, one.propagate = before


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert "PENSTOCK_API_KEY" not in os.environ


__all__ = ["Runtime", "penstock", "server", "server_runtime"]

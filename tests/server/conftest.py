"""One server with the embedded model for the whole package, asked over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from penstock.config import EngineConfig
from penstock.engine import AsyncLLM
from penstock.runtime import Runtime, load_runtime
from penstock.server import ServerConfig, Service, create_app
from penstock.server.lifecycle import uvicorn_config
from tests.models.stories import POSITIONS, VOCAB

LENGTH, IDS = POSITIONS, VOCAB
"""Of the embedded model: the most tokens of a sequence, and how many ids it has."""


@dataclass(slots=True)
class Running:
    """A server and what is behind it."""

    url: str
    service: Service
    llm: AsyncLLM

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def rest(self, seconds: float = 20.0) -> dict[str, Any]:
        """Wait until nothing runs; the engine's counters then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats = self.llm.stats()
            if not (stats["requests"] or stats["used_blocks"] or self.service.inflight):
                break
            time.sleep(0.02)
        return self.llm.stats()


@contextmanager
def serving(config: ServerConfig, **engine: Any) -> Iterator[Running]:
    """A server in a thread of this process."""
    llm = AsyncLLM(**engine)
    app = create_app(config)
    service: Service = app.state.service
    service.start(llm, "stories")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, replace(config, shutdown_timeout_s=1), service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        while not server.started:
            time.sleep(0.01)
        yield Running(url, service, llm)
    finally:
        server.should_exit = True
        thread.join()
        llm.shutdown()


@pytest.fixture(scope="session")
def server_runtime() -> Runtime:
    return load_runtime(EngineConfig.of())


@pytest.fixture(scope="session")
def server(server_runtime: Runtime) -> Iterator[Running]:
    """Without keys, on the embedded model."""
    with serving(ServerConfig(), runtime=server_runtime) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the server, nothing runs and no block is held."""
    yield
    if "server" in request.fixturenames:
        stats = request.getfixturevalue("server").rest()
        assert stats["used_blocks"] == 0, stats
        assert stats["requests"] == 0, stats

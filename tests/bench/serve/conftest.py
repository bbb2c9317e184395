"""Fake servers for a test, ended with it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fake_server import FakeServer, running


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeServer]]:
    """Start a fake server with these settings."""
    with ExitStack() as stack:

        def start(*, tls: ssl.SSLContext | None = None, **settings: Any) -> FakeServer:
            return stack.enter_context(running(FakeServer(**settings), tls))

        yield start

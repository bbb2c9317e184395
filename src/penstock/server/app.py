"""The server's ASGI application: every endpoint, and the one service behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from penstock import __version__
from penstock.server.config import ServerConfig
from penstock.server.handlers import install_handlers
from penstock.server.middleware import Front
from penstock.server.routes import (
    chat,
    completions,
    embeddings,
    messages,
    page,
    responses,
    status,
    tokens,
)
from penstock.server.service import Service
from penstock.server.tracing import OpenTelemetryTracer


def create_app(config: ServerConfig | None = None, service: Service | None = None) -> FastAPI:
    """The application. `app.state.service.start(llm, name)` gives it an engine.

    Until then it answers 503, but is alive.
    """
    config = config or (service.config if service else ServerConfig())
    if service is None:
        endpoint = config.otlp_endpoint
        service = Service(config, None if endpoint is None else OpenTelemetryTracer(endpoint))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="Penstock",
        version=__version__,
        description="An LLM inference engine that knows its floor.",
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # the front takes both, and knows no scheme to send clients to
    )
    app.state.service = service
    install_handlers(app)
    for module in (chat, completions, responses, embeddings, messages, tokens, status):
        app.include_router(module.router)
    if config.page:
        app.include_router(page.router)
    app.add_middleware(Front, config=config)
    return app

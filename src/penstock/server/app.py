"""The server's ASGI application: every endpoint, and the one service behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from penstock import __version__
from penstock.server.config import ServerConfig
from penstock.server.handlers import install_handlers
from penstock.server.middleware import OPEN_PATHS, Front
from penstock.server.routes import (
    adapters,
    chat,
    compaction,
    completions,
    embeddings,
    messages,
    page,
    responses,
    status,
    stored,
    tokens,
)
from penstock.server.service import Service
from penstock.server.tracing import OpenTelemetryTracer


class _Application(FastAPI):
    """Its document also says how clients tell who they are."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        if "security" not in document:
            schemes = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            document["components"]["securitySchemes"] = schemes
            with_key: list[dict[str, Any]] = [{name: []} for name in schemes]
            needed = bool(self.state.service.config.keys)
            document["security"] = with_key if needed else [{}, *with_key]
            for path in OPEN_PATHS:
                for operation in document["paths"].get(path, {}).values():
                    operation["security"] = []
        return document


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

    app = _Application(
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
    app.state.routes = list(app.routes)  # those below aren't among the application's own
    answering = (chat, completions, responses, compaction, stored, embeddings, messages)
    modules = (*answering, tokens, adapters, status)
    for module in (*modules, page) if config.page else modules:
        app.include_router(module.router)
        app.state.routes += module.router.routes
    app.add_middleware(Front, config=config)
    return app

"""The fleet's ASGI application, and its run from its instances' start to their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from penstock import __version__
from penstock.fleet.config import FleetConfig
from penstock.fleet.fleet import Fleet
from penstock.fleet.routes import router
from penstock.server.handlers import install_handlers
from penstock.server.lifecycle import Server, address, close, listen, uvicorn_config
from penstock.server.middleware import Front
from penstock.server.routes.page import static


def create_fleet_app(config: FleetConfig) -> FastAPI:
    """The application; `app.state.service` is its fleet, which starts and ends with it."""
    fleet = Fleet(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await fleet.start()
        yield
        await fleet.stop()

    app = FastAPI(
        title="Penstock fleet",
        version=__version__,
        description="Several models and instances of them behind one server.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = fleet
    install_handlers(app)
    app.state.routes = list(app.routes)  # those below aren't among the application's own
    for routes in (router, static) if config.server.page else (router,):
        app.include_router(routes)
        app.state.routes += routes.routes
    app.add_middleware(Front, config=config.server)
    return app


def serve_fleet(config: FleetConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises FleetError for a model that can't run from the start, ConfigError for a port that is
    taken, and KeyboardInterrupt after SIGINT.
    """
    app: Any = create_fleet_app(config)
    fleet: Fleet = app.state.service
    listener = listen(config.server)
    fleet.address = address(listener)
    server = Server(uvicorn_config(app, config.server, fleet), fleet)

    def give_up() -> None:
        server.should_exit = True

    fleet.on_failure = give_up
    try:
        server.run(sockets=[listener])
    finally:
        close(listener, config.server)
    if fleet.failure is not None:
        raise fleet.failure
    if server.interrupted:
        raise KeyboardInterrupt

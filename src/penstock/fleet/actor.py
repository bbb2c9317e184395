"""What runs on a node of a Ray cluster: an actor, and as its process `penstock serve`.

Ray loads this module on the node: it imports nothing large.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from penstock import __version__
from penstock.errors import ConfigError
from penstock.fleet.process import LocalInstance

_QUEUE = 1000  # lines that the fleet hasn't asked for; beyond, the server waits with its log
KEY_VARIABLE = "PENSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class Order:
    """A server that is to be started."""

    name: str  # of the instance
    arguments: tuple[str, ...]  # of `penstock serve`
    key: str  # which its callers must know
    threads: int
    gpus: int  # that Ray has reserved
    version: str  # of the fleet


@dataclass(frozen=True, slots=True)
class Started:
    """Where it is."""

    url: str
    pid: int


class Server:
    """The server's process, asked from afar. It doesn't outlive this actor."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str | int] = asyncio.Queue(_QUEUE)  # the exit code last
        self._instance: LocalInstance | None = None
        self._code: int | None = None
        self._end: asyncio.Task[None] | None = None
        self._port: socket.socket | None = None

    async def place(self) -> str:
        """Its node's address."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def start(self, order: Order) -> Started:
        """Start it, listening on the node's address. Raises ConfigError and OSError."""
        host = await self.place()
        if order.version != __version__:
            raise ConfigError(
                f"The node {host} has Penstock {__version__}, and the fleet {order.version}. "
                "Install the same on both."
            )
        self._port, port = _free_port(host)
        where = f"[{host}]" if ":" in host else host
        variables = {KEY_VARIABLE: order.key, "OMP_NUM_THREADS": str(order.threads)}
        if not order.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # those of the node are others'
        self._instance = await LocalInstance.start(
            order.name, (*order.arguments, f"--host={host}", f"--port={port}"), None,
            variables=variables, hear=self._lines.put,
        )  # fmt: skip
        self._end = asyncio.create_task(self._await_end(self._instance))
        return Started(f"http://{where}:{port}", self._instance.pid)

    async def _await_end(self, instance: LocalInstance) -> None:
        self._code = await instance.ended()
        await self._lines.put(self._code)

    async def said(self) -> tuple[Sequence[str], int | None]:
        """What it has logged since the last time, once there is some; at its end its exit code."""
        found: list[str] = []
        if self._code is not None and self._lines.empty():
            return found, self._code
        item = await self._lines.get()
        while isinstance(item, str):
            found.append(item)
            if self._lines.empty():
                return found, None
            item = self._lines.get_nowait()
        return found, item

    async def end(self, patience_s: float) -> None:
        """Let it answer whom it has for so long, and end it."""
        if self._instance is not None:
            await self._instance.end(patience_s)

    async def end_at_once(self) -> None:
        """End it and all that it has started."""
        if self._instance is not None:
            self._instance.end_at_once("The fleet let it go.")


def _free_port(host: str) -> tuple[socket.socket, int]:
    """A port that stays this process's until the socket is closed, and on which another may listen:
    two may bind the same address as long as only one of them listens. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, 0))
    except OSError:
        holder.close()
        raise
    return holder, holder.getsockname()[1]

"""A Ray cluster, as a fleet uses it. What is Ray's own stands here, and in the actor on the node.

Ray isn't needed where nothing runs on it, so it is imported when a fleet connects.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from penstock.errors import ConfigError, MissingExtraError, PenstockError, get_extra
from penstock.fleet.actor import Order, Server, Started
from penstock.fleet.needs import Needs, Node
from penstock.fleet.ray_lines import without_rays_lines

logger = logging.getLogger("penstock.fleet")

AUTO, LOCAL = "auto", "local"
_ANSWERS_S = 5.0
_AGAIN_S = 1.0  # until an actor whose node didn't answer is asked again
_PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_py_gcs_connect_timeout_s": "10"}
"""Ray's own would try for a quarter of an hour where something else listens."""
_STORE_BYTES = 80 << 20  # of a cluster that starts here: nothing is put into Ray's store
_ERROR = re.compile(r"[A-Za-z_.]+Error: ")
T = TypeVar("T")


class LostError(PenstockError):
    """An actor is no longer there, or can't do what it is asked just now; another may."""


class _UnknownError(LostError):
    """Its node doesn't answer; whether it is lost, Ray will know later."""


class Actor:
    """A `Server` on some node, asked from here. Every question raises LostError."""

    def __init__(self, handle: Any, ray: Any) -> None:
        self._handle = handle
        self._ray = ray

    async def place(self) -> str:
        """Its node's address, once Ray has started it there."""
        return str(await self._ask("place"))

    async def start(self, order: Order) -> Started:
        """Start its server. Raises ConfigError where none of this version can be."""
        found: Started = await self._ask("start", order)
        return found

    async def said(self) -> tuple[Sequence[str], int | None]:
        """What the server has logged, once there is some, and at its end its exit code."""
        while True:
            try:
                found: tuple[Sequence[str], int | None]
                found = await self._ask("said")
            except _UnknownError:
                await asyncio.sleep(_AGAIN_S)
            else:
                return found

    def end(self, patience_s: float) -> None:
        """Have the server answer whom it has for so long, and end; `said` tells when it has."""
        self._tell("end", patience_s)

    def end_at_once(self) -> None:
        """Have the server end, and all that it has started."""
        self._tell("end_at_once")

    def kill(self) -> None:
        """End the actor: the server ends with it, and what Ray has reserved for it is free."""
        if self._ray.is_initialized():  # or Ray would start a cluster, to end this in
            with self._failures_logged():
                self._ray.kill(self._handle, no_restart=True)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except errors.ActorUnavailableError as error:
            raise _UnknownError(_in_short(str(error))) from error
        except errors.RayTaskError as error:  # what it raised itself
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from error
            raise LostError(f"Its server failed on its node: {error.cause!r}.") from error
        except Exception as error:  # Ray's own, of any kind
            raise LostError(f"Its actor is lost: {_in_short(str(error))}") from error

    def _tell(self, method: str, *arguments: Any) -> None:
        with self._failures_logged():
            getattr(self._handle, method).remote(*arguments)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Whoever ends an actor goes on where it can't be told: then it is lost, and is ended."""
        try:
            yield
        except Exception as error:  # Ray's own, of any kind
            logger.warning("an actor can't be told", extra={"fields": {"why": str(error)}})


class Cluster:
    """A connection to a cluster; one in a process."""

    def __init__(
        self, ray: Any, free: Callable[[], dict[str, Any]], thread: ThreadPoolExecutor
    ) -> None:
        """free: what nodes have that nobody has reserved; thread: one, which stays: a cluster that
        was started here ends with it.
        """
        self._ray = ray
        self._thread = thread
        self._free = free
        self._class = ray.remote(Server)

    @classmethod
    async def connect(cls, address: str) -> Cluster:
        """To `HOST:PORT`, the one of this machine (`auto`), or one that starts here (`local`).

        Raises MissingExtraError without Ray, ConfigError where no cluster answers.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError(f"A fleet on Ray needs ray; {get_extra('ray')}.")
        thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-ray")
        loop = asyncio.get_running_loop()
        try:
            ray, free = await loop.run_in_executor(thread, _connect, address)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        _heed_signals()
        return cls(ray, free, thread)

    async def disconnect(self) -> None:
        """Ray ends what actors are left of ours, and a cluster that was started here."""
        await self._in_thread(self._ray.shutdown)
        self._thread.shutdown()

    async def actor(self, needs: Needs) -> Actor:
        """One that Ray starts where what it needs is free, as far from others as may be.

        Raises LostError where Ray takes no actor.
        """
        options: dict[str, Any] = {
            "num_cpus": needs.num_cpus,
            "num_gpus": needs.num_gpus,
            "resources": dict(needs.resources),
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # the fleet starts another
        }
        try:
            handle = await self._in_thread(lambda: self._class.options(**options).remote())
        except Exception as error:  # Ray's own, of any kind
            raise LostError(f"Ray takes no actor: {_in_short(str(error))}") from error
        return Actor(handle, self._ray)

    async def nodes(self) -> list[Node]:
        """Those that are alive."""
        return await self._in_thread(self._nodes)

    def _nodes(self) -> list[Node]:
        free = self._free()
        return [
            Node(x["NodeManagerAddress"], x["Resources"], free.get(x["NodeID"], {}))
            for x in self._ray.nodes()
            if x["Alive"]
        ]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _connect(address: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Ray's module, connected, and what tells what is free by node. Raises ConfigError."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # of a cluster that starts here; nothing is sent
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # or Ray takes the place of Python's print
    if address != LOCAL:
        os.environ |= {k: v for k, v in _PATIENCE.items() if k not in os.environ}
    import ray

    try:
        from ray._private.state import available_resources_per_node  # as Ray Serve does
    except ImportError as error:
        raise ConfigError(
            f"Ray {ray.__version__} doesn't tell what its nodes have free, as versions from 2.60 "
            f"and below 3 do ({error}); {get_extra('ray')}."
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():
        raise ConfigError("This process is connected to a Ray cluster already; a fleet needs one.")
    own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        if address not in (AUTO, LOCAL):
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S).close()
        # a cluster that starts here keeps this process's stderr
        with nullcontext() if address == LOCAL else without_rays_lines():
            ray.init(
                address=address,
                log_to_driver=False,  # instances' lines come another way
                logging_level=logging.ERROR,
                **(own if address == LOCAL else {}),
            )
    except Exception as error:  # of any kind, and C++'s among them
        raise ConfigError(
            f"The Ray cluster {address!r} doesn't answer: {_in_short(str(error))} Start it with "
            "`ray start --head`, and this machine's node with `ray start --address=HOST:PORT`."
        ) from error
    return ray, available_resources_per_node


def _heed_signals() -> None:
    """Ray's handler of SIGTERM takes it for a crash: it would abort this process 3 s later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _in_short(text: str) -> str:
    """What one of Ray's errors says of its cause; it is a page long, with numbers of its own."""
    lines = [line for line in text.splitlines() if line.strip()] or ["It says nothing."]
    found = lines[0]
    if found.startswith("The actor died"):
        errors = [line for line in lines if _ERROR.match(line)]
        plain = [line for line in lines[1:] if not line[0].isspace()]
        found = (errors[-1:] or plain[:1] or [found])[0]
    return found if found.endswith(".") else f"{found}."

"""Instances as actors of a Ray cluster: of two nodes, which are processes of this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx2 as httpx
import pytest
from typer.testing import Result

from penstock.errors import ConfigError, MissingExtraError
from penstock.fleet.actor import Order, Server
from penstock.fleet.cluster import Actor, Cluster, LostError, _in_short
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.needs import Needs
from penstock.fleet.ray_lines import without_rays_lines
from penstock.fleet.remote import RemoteInstance, RemoteWorker
from tests.fleet.conftest import Running, front, running
from tests.fleet.test_continuing import said
from tests.fleet.test_instances import LONG, SMALL, alive, process, until, workers
from tests.server.conftest import Running as OneServer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed"),
]
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200}
"""A node that is lost is noticed after five of these, not of 3 s."""
PROMPTS = ["Once upon a time", "The dog", "In the park there was", "Tom and Lily"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and a node with a CPU; nothing is sent, nothing stays in the user's folders."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):  # with a short path: it has sockets
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray._raylet import Config
        from ray.cluster_utils import Cluster as Nodes

        Config.initialize("")  # should Ray have been imported before
        found = Nodes(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "_system_config": SOON},
        )
        found.add_node(num_cpus=1, num_gpus=1)  # Ray counts what it is told of
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def there(cluster: Any) -> Iterator[Running]:
    """Two instances of a CPU each, on a node each."""
    cluster.add_node(num_cpus=1)
    model = ModelConfig("m", "stories", (2, 2), SMALL)
    with running(FleetConfig((model,), front(), ray=cluster.address)) as fleet:
        ready(fleet)
        yield fleet


def ready(fleet: Running) -> None:
    fleet.until(lambda x: [w["state"] for w in x["models"][0]["workers"]] == ["ready"] * 2)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def variables(worker: dict[str, Any]) -> list[bytes]:
    return Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")


def free() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs ray; .*\[ray\]"):
        asyncio.run(Cluster.connect("auto"))


def test_another_version_is_refused() -> None:
    order = Order("m/0", (), "key", 1, 0, "0.0.1")
    with pytest.raises(ConfigError, match=r"and the fleet 0\.0\.1\. Install the same"):
        asyncio.run(Server().start(order))


class Handle:
    """An actor's, each of whose methods does one thing."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.remote = lambda *arguments: answer()

    def __getattr__(self, name: str) -> Handle:
        return self


def raising(error: BaseException, *, at_once: bool = False) -> Actor:
    """One that raises what Ray says of it, when it is asked or when it answers."""

    def ask() -> Any:
        if at_once:
            raise error
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(error)
        return answer

    import ray

    return Actor(Handle(ask), ray)


def task_error(cause: Exception) -> Exception:
    from ray.exceptions import RayTaskError

    found: Exception = RayTaskError("start", "…", cause)
    return found


@pytest.mark.parametrize(
    ("actor", "expected", "words"),
    [
        (lambda: raising(task_error(ConfigError("Other versions."))), ConfigError, "Other versi"),
        (lambda: raising(task_error(OSError(11, "Try again"))), LostError, "Its server .*again"),
        (lambda: raising(task_error(ValueError("x"))), LostError, r"ValueError\('x'\)"),
        (lambda: raising(RuntimeError("No connection."), at_once=True), LostError, "lost: No con"),
    ],
)  # fmt: skip
def test_what_passes_is_tried_again(
    actor: Callable[[], Actor], expected: type[Exception], words: str
) -> None:
    """Only what would be the same again is given up at once: of another version, no other node."""
    asked = actor()

    async def start() -> tuple[int, str | None]:
        with pytest.raises(expected, match=words):
            await asked.place()
        instance = RemoteInstance("m/0", [], cast(Cluster, None), Needs(), asked)
        code = await instance.ended()
        instance.end_at_once("It is let go.")  # of one that is lost already: says nothing
        return code, instance.given_up

    code, why = asyncio.run(start())
    assert code == (1 if expected is ConfigError else -signal.SIGKILL)
    assert why is not None and re.search(words, why)


@pytest.mark.parametrize("fails", [True, False])
def test_an_actor_that_is_nowhere_is_let_go_in_time(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Ray can't be told to end it, or doesn't heed that, and tells nothing of it."""

    class Nowhere:
        killed = 0

        async def place(self) -> str:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        def kill(self) -> None:
            self.killed += 1
            with Actor(None, None)._failures_logged():
                if fails:
                    raise RuntimeError("There is no such actor.")

    async def end(late: bool) -> tuple[int, str | None]:
        instance = RemoteInstance("m/0", [], cast(Cluster, None), Needs(), cast(Actor, Nowhere()))
        if late:
            instance.end_at_once("It wasn't ready in time.")
            return await asyncio.wait_for(instance.ended(), 5), instance.given_up
        await asyncio.wait_for(instance.end(60), 5)
        return await instance.ended(), instance.given_up

    monkeypatch.setattr("penstock.fleet.remote._LEAVING_S", 0.1)
    for late, why in ((True, "It wasn't ready in time."), (False, "It was ended before it ran.")):
        assert asyncio.run(end(late)) == (-signal.SIGKILL, why)


def test_a_cluster_that_takes_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance is tried again, and then given up with what Ray says."""

    class Nothing:
        async def actor(self, needs: Needs) -> Actor:
            raise LostError("Ray takes no actor: the head is gone.")

    monkeypatch.setattr("penstock.fleet.worker._BACKOFF_S", (0.0,))
    cluster = cast(Cluster, Nothing())
    worker = RemoteWorker("m/0", "m", [], cluster, Needs(), 5.0, lambda: None)
    asyncio.run(worker.run())
    assert (worker.state, worker.starts) == ("failed", 3)
    assert "Ray takes no actor: the head is gone." in worker.reason


@pytest.mark.parametrize(("timeout_s", "starts"), [(60.0, 3), (0.0, 1)])
def test_a_crash_is_no_lack(monkeypatch: pytest.MonkeyPatch, timeout_s: float, starts: int) -> None:
    """What was lacking a moment ago doesn't make a crash final; waiting in vain for it does."""

    class Crashing:
        pid, lack, last_words, given_up = 1, "It waits for CPU 9.", "", None

        async def reached(self) -> None:
            await asyncio.Event().wait()

        async def ended(self) -> int:
            await asyncio.sleep(0.3)  # the lack is seen before
            return -signal.SIGSEGV

        def end_at_once(self, why: str) -> None:
            self.given_up = why

    async def start() -> Any:
        return Crashing()

    monkeypatch.setattr("penstock.fleet.worker._BACKOFF_S", (0.0,))
    worker = RemoteWorker("m/0", "m", [], cast(Cluster, None), Needs(), timeout_s, lambda: None)
    monkeypatch.setattr(worker, "_start", start)
    asyncio.run(worker.run())
    assert (worker.state, worker.starts, worker.lack) == ("failed", starts, "It waits for CPU 9.")


def test_what_ray_says_in_short() -> None:
    died = "The actor died unexpectedly before finishing this task.\n\tclass_name: Server\n"
    gone = "The actor died because its node has died. Node Id: 5f12"
    assert _in_short(f"{died}\tip: 10.0.0.7\n{gone}\n\tterminated") == f"{gone}."
    trace = "The actor died because of an error raised in its creation task, Server.__init__()\n"
    missing = "ModuleNotFoundError: No module named 'penstock'"
    assert _in_short(f"{trace}  File x\nRuntimeError: It failed:\n\n  {missing}\n{missing}") == (
        f"{missing}."
    )
    assert _in_short("Could not find any. Start it.") == "Could not find any. Start it."
    assert _in_short("") == "It says nothing."


def test_nothing_stays_behind(cluster: Any) -> None:
    """There is one CPU: the second fleet runs only if the first has given it back."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        with process("m=stories", f"--ray={cluster.address}") as one:
            (worker,) = workers(Running(one.ready(), None), "m")  # type: ignore[arg-type]
            actor = parent(worker["pid"])
            one.popen.send_signal(number)
            assert one.popen.wait(30) == (0 if number == signal.SIGTERM else -number)
            until(lambda: not alive(worker["pid"]) and not alive(actor))  # noqa: B023
        own = [line for line in one.lines if line.startswith("m/0 | ")]
        assert any(" ready url=http://" in line for line in own)
        assert not [line for line in one.lines if "***" in line]  # as Ray's handler of signals has


def test_models_come_and_go(cluster: Any) -> None:
    """Demand reserves, rest frees; what a model that can't run said is passed on."""
    needs = Needs(num_gpus=1)
    good = ModelConfig("m", "stories", (0, 1), SMALL, idle_timeout_s=2, ray=needs)
    bad = ModelConfig("bad", "no/such/folder", (0, 1))
    large = ModelConfig("large", "stories", (0, 1), ray=Needs(4, resources={"fast": 1}))
    config = FleetConfig((good, bad, large), front(), ray=cluster.address, start_timeout_s=20)
    with running(config) as fleet:
        assert free() == 1
        assert fleet.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert free() == 0
        (worker,) = workers(fleet, "m")
        assert b"CUDA_VISIBLE_DEVICES=0" in variables(worker)
        until(lambda: not workers(fleet, "m") and free() == 1)
        answer = fleet.post("/v1/completions", {"model": "bad", "prompt": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "model_failed")
        assert "Its process ended with 1: " in error["message"]
        assert "no/such/folder" in error["message"]
        fleet.post("/models/load", {"model": "large"})
        until(lambda: "reason" in fleet.get("/v1/models/large")["status"])
        told = fleet.get("/v1/models/large")["status"]
        assert told["value"] == "loading"
        assert "CPU 4, fast 1. Free: CPU 1 of 1, fast 0 of 0 on " in told["reason"]
        assert told["reason"].endswith(" No node is large enough.")
        fleet.post("/models/unload", {"model": "large"})
        until(lambda: not workers(fleet, "large"))


def test_no_cluster(penstock: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.logs.configure", lambda kind: None)
    found = penstock("fleet", "m=stories", "--ray=127.0.0.1:1", "--port=0")
    assert found.exit_code == 1
    assert "The Ray cluster '127.0.0.1:1' doesn't answer: [Errno 111]" in found.output


def test_rays_own_lines_are_kept_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Those of its library, which come before an error that says the same; nobody else's."""
    rays = "[2026-11-29 10:38:21,901 W 12 14] rpc_client.h:153: Failed to connect to GCS at …\n"
    fatal = rays.replace(" W ", " C ")
    with without_rays_lines():
        for text in (rays, "ours\n", rays.replace(" W ", " E "), fatal, "not [", "a line"):
            os.write(2, text.encode())
    os.write(2, rays.encode())
    assert capfd.readouterr().err == f"ours\n{fatal}not [a line{rays}"


def test_it_answers_like_one_server(there: Running, server: OneServer) -> None:
    names = set()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
        answer = there.post("/v1/completions", {"model": "m", **body})
        names.add(answer.headers["x-penstock-worker"])
        with server.client() as client:
            expected = client.post("/v1/completions", json={"model": "stories", **body}).json()
        assert answer.json()["choices"][0]["text"] == expected["choices"][0]["text"]
    assert names == {"m/0", "m/1"}


def test_instances_have_a_key_and_what_was_reserved(there: Running) -> None:
    for worker in workers(there, "m"):
        answer = httpx.get(f"{worker['url']}/v1/models")
        assert answer.status_code == 401
        found = variables(worker)
        assert b"OMP_NUM_THREADS=1" in found
        assert b"CUDA_VISIBLE_DEVICES=" in found
        (key,) = (x.partition(b"=")[2] for x in found if x.startswith(b"PENSTOCK_API_KEY="))
        assert key.decode() not in Path(f"/proc/{worker['pid']}/cmdline").read_text()


def test_a_killed_process_loses_nothing(there: Running) -> None:
    """The server's, and then an actor's, with which its server ends."""
    body = {**LONG, "model": "m"}
    expected = said(there.stream("/v1/completions", body))
    for which in (lambda pid: pid, parent):
        pids: list[int] = []

        def kill(worker: dict[str, Any]) -> None:
            pids.append(worker["pid"])  # noqa: B023
            os.kill(which(worker["pid"]), signal.SIGKILL)  # noqa: B023

        assert said(stream_and(there, body, kill)) == expected
        until(lambda: not alive(pids[0]))  # noqa: B023
    ready(there)


def test_a_killed_node_loses_nothing(there: Running, cluster: Any) -> None:
    body = {**LONG, "model": "m"}
    expected = said(there.stream("/v1/completions", body))
    nodes = {x.all_processes["raylet"][0].process.pid: x for x in cluster.worker_nodes}
    killed: list[Any] = []

    def kill(worker: dict[str, Any]) -> None:
        """All at once, as when its machine stops."""
        actor = parent(worker["pid"])
        raylet = parent(actor)
        killed.append(nodes[raylet])
        for pid in (raylet, actor, worker["pid"]):
            os.kill(pid, signal.SIGKILL)

    assert said(stream_and(there, body, kill)) == expected
    until(lambda: "reason" in there.get("/v1/models/m")["status"])
    status = there.get("/v1/models/m")["status"]
    assert status["value"] == "loaded"  # the other one answers
    assert "reserve: CPU 1. Free: CPU 0 of 1 on " in status["reason"]
    cluster.remove_node(killed[0], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    ready(there)
    assert "reason" not in there.get("/v1/models/m")["status"]
    assert said(there.stream("/v1/completions", body)) == expected


def stream_and(
    fleet: Running, body: dict[str, Any], act: Callable[[dict[str, Any]], None]
) -> list[Any]:  # fmt: skip
    """All events of an answer during which something happens to its instance."""
    events: list[Any] = []
    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        name = answer.headers["x-penstock-worker"]
        for i, line in enumerate(answer.iter_lines()):
            if line.startswith("data: "):
                events.append(line[6:])
            if i == 40:
                act(next(x for x in workers(fleet, body["model"]) if x["name"] == name))
    return [x if x == "[DONE]" else json.loads(x) for x in events]

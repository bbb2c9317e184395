"""Instances as actors of a Ray cluster: of two nodes, which are processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from penstock.errors import ConfigError
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.needs import Needs, Node
from tests.fleet.conftest import Running, front, running
from tests.fleet.test_continuing import said
from tests.fleet.test_instances import LONG, SMALL, alive, process, until, workers
from tests.server.conftest import Running as Server

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed"),
]
PROMPTS = ["Once upon a time", "The dog", "In the park there was", "Tom and Lily"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node with a CPU; nothing is sent, nothing stays in the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray._raylet import Config
        from ray.cluster_utils import Cluster

        Config.initialize("")  # should Ray have been imported before
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def there(cluster: Any) -> Iterator[Running]:
    """Two instances of a CPU each, on a node each."""
    cluster.add_node(num_cpus=1, resources={"second": 1})
    model = ModelConfig("m", "stories", (2, 2), SMALL)
    with running(FleetConfig((model,), front(), ray=cluster.address)) as fleet:
        ready(fleet)
        yield fleet


def ready(fleet: Running) -> None:
    fleet.until(lambda x: [w["state"] for w in x["models"][0]["workers"]] == ["ready"] * 2)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def free() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def test_it_answers_like_one_server(there: Running, server: Server) -> None:
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
        variables = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=1" in variables
        assert b"CUDA_VISIBLE_DEVICES=" in variables
        (key,) = (x.partition(b"=")[2] for x in variables if x.startswith(b"PENSTOCK_API_KEY="))
        assert key.decode() not in Path(f"/proc/{worker['pid']}/cmdline").read_text()


@pytest.mark.parametrize("which", ["server", "actor"])
def test_a_killed_process_loses_nothing(there: Running, which: str) -> None:
    body = {**LONG, "model": "m"}
    expected = said(there.stream("/v1/completions", body))
    pids: list[int] = []

    def kill(worker: dict[str, Any]) -> None:
        pids.append(worker["pid"])
        os.kill(pids[0] if which == "server" else parent(pids[0]), signal.SIGKILL)

    assert said(stream_and(there, body, kill)) == expected
    until(lambda: not alive(pids[0]))
    ready(there)


def test_a_killed_node_loses_nothing(there: Running, cluster: Any) -> None:
    body = {**LONG, "model": "m"}
    expected = said(there.stream("/v1/completions", body))
    second = next(x for x in cluster.worker_nodes)
    raylet = second.all_processes["raylet"][0].process.pid
    on_second = next(
        x["name"] for x in workers(there, "m") if parent(parent(x["pid"])) == raylet
    )  # fmt: skip

    def kill(worker: dict[str, Any]) -> None:
        os.kill(raylet, signal.SIGKILL)

    # by the policy, the one that has computed this prompt
    assert said(stream_and(there, body, kill, on_second)) == expected
    told = there.until(lambda x: "It waits" in "".join(w["reason"] for w in x["models"][0]["workers"]))
    (waits,) = (w["reason"] for w in told["models"][0]["workers"] if w["state"] != "ready")
    assert waits.startswith("It waits for what Ray is to reserve: CPU 1. Free: CPU 0 of 1 on ")
    status = there.get("/v1/models/m")["status"]
    assert status == {"value": "loaded", "reason": waits}
    cluster.remove_node(second, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    ready(there)
    assert said(there.stream("/v1/completions", body)) == expected


def stream_and(fleet: Running, body: dict[str, Any], act: Any, which: str = "") -> list[Any]:
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

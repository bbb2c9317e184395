"""How much is asked of an engine: what autoscalers and fleets go by."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.server import ServerConfig
from penstock.server.demand import capacity_of, demand_of
from tests.server.conftest import Running, serving


@pytest.mark.parametrize(
    ("running", "waiting", "swapped", "used", "capacity", "demand"),
    [
        (0, 0, 0, 0, 8, 0.0),
        (2, 0, 0, 50, 8, 0.25),
        (8, 0, 0, 50, 8, 1.0),
        (8, 4, 0, 50, 8, 1.5),
        (2, 4, 0, 95, 2, 3.0),  # the cache is full with two
        (2, 4, 0, 50, 8, 0.75),  # they wait for a step's tokens
        (2, 0, 2, 95, 8, 0.5),
        (0, 4, 0, 0, 8, 0.5),  # they have only just come
    ],
)
def test_demand(
    running: int, waiting: int, swapped: int, used: int, capacity: int, demand: float
) -> None:
    stats = {"running": running, "waiting": waiting, "swapped": swapped}
    stats |= {"used_blocks": used, "blocks": 100}
    assert capacity_of(stats, 8) == capacity
    assert demand_of(stats, 8) == demand


def test_load_and_metrics(server: Running) -> None:
    with server.client() as client:
        assert client.get("/load").json() == {
            "server_load": 0, "running": 0, "waiting": 0, "swapped": 0,
            "capacity": server.llm.config.scheduler.max_num_seqs, "demand": 0.0,
        }  # fmt: skip
        assert 'penstock:demand{engine="0",model_name="stories"} 0.0' in client.get("/metrics").text


def test_more_than_fit() -> None:
    """Three at once where one has room: two wait, and a third instance would be busy."""
    with serving(ServerConfig(), num_gpu_blocks_override=64, max_num_seqs=1) as running:
        body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True}

        def ask() -> None:
            with running.client() as client:
                client.post("/v1/completions", json=body)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        with running.client() as client:
            end = time.monotonic() + 20
            while (load := client.get("/load").json())["demand"] < 3:
                assert time.monotonic() < end, load
        assert (load["running"], load["waiting"], load["capacity"]) == (1, 2, 1)
        for thread in threads:
            thread.join()

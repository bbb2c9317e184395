"""What must not go wrong: connections that are mixed up, instances that nobody looks after."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from penstock.cli.server_options import FrontOptions
from penstock.fleet import process
from penstock.fleet.ask import Ask
from penstock.fleet.config import RESERVED, FleetConfig, ModelConfig
from penstock.fleet.group import Group
from penstock.fleet.link import Link
from penstock.fleet.process import LocalInstance
from penstock.fleet.worker import Worker
from penstock.server import Limits, ServerConfig
from penstock.server.errors import ApiError
from penstock.server.sse import dumps
from tests.fleet.conftest import Pair, Running, elsewhere, front, running
from tests.fleet.test_fleet_routes import ENSEMBLE, PROMPT, Scripted, before, scripted
from tests.fleet.test_instances import LONG, SMALL, alive
from tests.server.conftest import Running as Server


def test_every_caller_gets_its_own_answer(pair: Pair) -> None:
    """Connections are kept and used again, each by one request at a time."""
    with pair.fleet.client() as client:

        def ask(i: int) -> None:
            text = f"number {i} of many"
            tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
            answer = client.post("/detokenize", json={"tokens": tokens})
            assert answer.status_code == 200
            assert answer.json()["prompt"].endswith(f">{text}")

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(ask, range(600)))


def test_an_exchange_is_closed_once() -> None:
    """Whoever closes it again must not give away a connection that is another's by now."""

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, OSError):
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        link = Link(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        first = await link.request("GET", "/", (), b"")
        await first.whole()
        second = await link.request("GET", "/", (), b"")
        first.close()
        assert not link._idle  # it is the second's
        await second.whole()
        assert len(link._idle) == 1
        link.abort()
        await asyncio.sleep(0.05)
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def group_of(
    model: ModelConfig, make_room: Callable[[Group], Awaitable[None]] | None = None
) -> Group:
    async def room(group: Group) -> None:
        pass

    return Group(model, FleetConfig((model,), start_timeout_s=2), Path("/tmp"), make_room or room)


class Idle(Worker):
    """Ready when it is told so."""

    async def run(self) -> None:
        await asyncio.sleep(3600)


def test_who_is_ready_while_room_is_made_is_noticed() -> None:
    async def run() -> None:
        async def make_room(group: Group) -> None:
            worker = Idle("m/9", "m", Link("unix:/x"), group._wake)
            group._add(worker)
            worker.become("ready")
            await asyncio.sleep(0.01)

        group = group_of(ModelConfig("m", "stories", (0, 1)), make_room)
        group.start = lambda count: None  # type: ignore[method-assign]
        ask = Ask.of("/v1/completions", b"{}", ())
        lease = await group.lease(ask, set())
        assert lease.worker.name == "m/9"
        lease.close()
        lease.close()
        assert lease.worker.outstanding == 0
        await group.stop_all()

    asyncio.run(run())


def test_waiters_hear_all_signals() -> None:
    """One makes room, and another looks meanwhile: both hear of the instance that is ready."""

    async def run() -> None:
        made = asyncio.Event()

        async def make_room(group: Group) -> None:
            await made.wait()

        group = group_of(ModelConfig("m", "stories", (0, 1)), make_room)
        group.start = lambda count: None  # type: ignore[method-assign]
        ask = Ask.of("/v1/completions", b"{}", ())
        first = asyncio.create_task(group.lease(ask, set()))
        await asyncio.sleep(0.01)
        worker = Idle("m/9", "m", Link("unix:/x"), group._wake)
        group._add(worker)
        worker.become("ready")
        second = await group.lease(ask, set())
        made.set()
        assert (await first).worker is second.worker is worker
        await group.stop_all()

    asyncio.run(run())


def test_what_always_runs_is_tried_again() -> None:
    async def run() -> None:
        group = group_of(ModelConfig("m", "stories", (1, 1)))
        started: list[int] = []
        failed = Idle("m/0", "m", Link("unix:/x"), group._wake)
        group._add(failed)
        failed.become("failed", "no")
        group.start = started.append  # type: ignore[method-assign]
        now = time.monotonic()
        group.scale(now)
        assert not started  # it has only just failed
        failed.since -= 60
        group.scale(now + 60)
        assert started == [1]
        await group.stop_all()

    asyncio.run(run())


def test_who_waits_for_resources_ends_first() -> None:
    async def run() -> None:
        group = group_of(ModelConfig("m", "stories", (1, 2), idle_timeout_s=1))
        there, waits = (Idle(f"m/{i}", "m", Link(""), group._wake) for i in range(2))
        for worker in (there, waits):
            group._add(worker)
        there.become("ready")
        waits.lack = "CPU 1"
        now = time.monotonic()
        assert group.scale(now) is None
        assert group.lack == "CPU 1"
        assert group.scale(now + 2) is waits
        await group.stop_all()

    asyncio.run(run())


def test_a_watcher_goes_on_whatever_happens(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with before(scripted) as fleet:
        (worker,) = fleet.fleet.groups["stories"].workers
        look, left = worker._look, [2]

        async def fails() -> None:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("nobody expected this")
            await look()

        monkeypatch.setattr(worker, "_look", fails)
        fleet.until(lambda x: left[0] == 0 and x["models"][0]["state"] == "loaded")
        assert fleet.post("/v1/completions", PROMPT).status_code == 200


def test_who_was_never_there_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FleetConfig((elsewhere("http://127.0.0.1:1"),), front())) as fleet:
        told = fleet.until(lambda x: x["models"][0]["workers"][0]["state"] == "unready")
        assert "No connection to http://127.0.0.1:1" in told["models"][0]["workers"][0]["reason"]


def test_a_server_that_is_none_of_ours(scripted: Scripted) -> None:
    scripted.ready = (404, {})
    with running(FleetConfig((elsewhere(scripted.url),), front())) as fleet:
        told = fleet.until(lambda x: x["models"][0]["workers"][0]["state"] == "unready")
        assert told["models"][0]["workers"][0]["reason"] == "/ready answers HTTP 404."


def test_streams_that_are_none(scripted: Scripted) -> None:
    """No event that ends as ours do: an error, not a stream without an end."""
    with before(scripted, max_attempts=1) as fleet:
        scripted.answer = (200, b"data: {}\r\n\r\n", {"content-type": "text/event-stream"})
        answer = fleet.post("/v1/completions", {**PROMPT, "stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")


def test_headers_of_streams(scripted: Scripted) -> None:
    with before(scripted) as fleet:
        kind = {"content-type": "text/event-stream", "x-penstock-dropped-messages": "2"}
        scripted.answer = (200, b"data: [DONE]\n\n", kind)
        answer = fleet.post("/v1/completions", {**PROMPT, "stream": True})
        assert answer.headers["x-penstock-dropped-messages"] == "2"
        assert answer.headers["x-penstock-worker"] == "stories/0"


class TestManySamples:
    def test_numbers_that_cannot_be(self, scripted: Scripted) -> None:
        with before(scripted) as fleet:
            body = f'{{"model": "stories", "prompt": "a", "n": 1{"0" * 400}}}'
            done: list[int] = []

            def ask() -> None:
                with fleet.client(headers={"content-type": "application/json"}) as client:
                    done.append(client.post("/v1/completions", content=body).status_code)

            thread = threading.Thread(target=ask)
            with scripted.held():
                thread.start()
                fleet.until(lambda x: x["models"][0]["outstanding"] == 4096)
                for path in ("/fleet", "/load"):
                    assert fleet.get(path)
                assert "instances_wanted" in fleet.text("/metrics")
            thread.join()
            assert done == [200]

    def test_the_queue_counts_requests(
        self, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.fleet.group.ELSEWHERE_S", 1.0)
        far = elsewhere("http://127.0.0.1:1", name="far")
        config = FleetConfig((elsewhere(scripted.url), far), front(max_queue_size=50))
        with running(config) as fleet:
            fleet.until(lambda x: x["models"][0]["state"] == "loaded")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(
                    fleet.post, "/v1/completions", {"model": "far", "prompt": "a", "n": 4000}
                )
                fleet.until(lambda x: x["models"][1]["outstanding"] == 4000)
                assert fleet.post("/v1/completions", PROMPT).status_code == 200
                assert waiting.result().status_code == 503

    def test_the_queue_is_bounded(self, scripted: Scripted) -> None:
        """Of an instance that computes 4 at once, and of which 2 more may wait."""
        with before(scripted, server=front(max_queue_size=2)) as fleet:
            scripted.wait_s = 0.5
            with ThreadPoolExecutor(12) as pool:
                asked = [pool.submit(fleet.post, "/v1/completions", PROMPT) for _ in range(12)]
                statuses = sorted(x.result().status_code for x in asked)
            assert statuses.count(429) in range(4, 7)
            assert statuses.count(200) == 12 - statuses.count(429)

    def test_ranked_samples_count(self) -> None:
        ask = Ask.of("/v1/completions", dumps({"n": 2, "best_of": 64}).encode(), ())
        assert ask.sequences == 64


def test_stages_give_their_places_back(server: Server) -> None:
    limits = Limits(max_concurrency=2)  # the first round has two
    config = FleetConfig(
        (elsewhere(server.url),), front(limits=limits), ensembles=(ENSEMBLE,)
    )  # fmt: skip
    with running(config) as fleet:
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        body = {"model": "both", "messages": [{"role": "user", "content": "a dog"}]}
        assert fleet.post("/v1/chat/completions", body).status_code == 200


class TestConfiguration:
    def test_all_options_of_the_front_are_reserved(self) -> None:
        options = {f"--{x.name.replace('_', '-')}" for x in fields(FrontOptions)}
        assert options <= RESERVED.keys()

    def test_instances_get_what_they_must(self) -> None:
        async def run() -> None:
            model = ModelConfig("m", "stories", options=("--seed=1",))
            server = front(max_body_bytes=1000, log_requests=False, max_queue_size=9)
            group = Group(model, FleetConfig((model,), server), Path("/tmp"), None)  # type: ignore[arg-type]
            arguments = group._local(0)._arguments
            assert "--no-log-requests" in arguments
            assert "--max-body-size=5096" in arguments
            assert "--seed=1" in arguments

        asyncio.run(run())

    @pytest.mark.parametrize("url", ["http://h:99999", "http://h:x", "http://h:0"])
    def test_ports_that_cannot_be(self, url: str) -> None:
        with pytest.raises(Exception, match="isn't an address"):
            elsewhere(url)


def test_guesses_of_keys_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever says that it is a fleet isn't let off."""
    caplog.set_level("INFO", "penstock.server")
    headers = {"user-agent": "penstock-fleet"}
    with server.client(headers=headers) as client:
        assert client.get("/v1/models/none").status_code == 404
        assert client.get("/v1/models").status_code == 200
        end = time.monotonic() + 5
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
    said = [x.fields["endpoint"] for x in caplog.records if x.getMessage() == "answered"]  # type: ignore[attr-defined]
    assert said == ["/v1/models/none"]


@pytest.mark.multiprocess
def test_output_that_a_child_keeps_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process is its end, whoever still has its output."""
    child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    monkeypatch.setattr(process, "_RUN", child)

    async def run() -> float:
        one = await LocalInstance.start("m/0", (), None)
        await asyncio.sleep(1)
        os.kill(one.pid, signal.SIGKILL)
        start = time.monotonic()
        assert await one.ended() == -signal.SIGKILL
        return time.monotonic() - start

    try:
        assert asyncio.run(run()) < 5
    finally:
        os.system("pkill -f '^sleep 60$'")


@pytest.fixture(scope="module")
def local() -> Iterator[Running]:
    """On demand, and one that always runs; fleets look often."""
    patch = pytest.MonkeyPatch()
    patch.setattr("penstock.fleet.worker.PROBE_S", 0.1)
    patch.setattr("penstock.fleet.worker._PROBE_TIMEOUT_S", 0.3)
    models = tuple(ModelConfig(x, "stories", (0, 1), SMALL) for x in "ab")
    always = ModelConfig("c", "stories", options=SMALL)
    patient = ServerConfig(shutdown_timeout_s=30)  # a stream of 700 tokens ends in that
    with running(FleetConfig((*models, always), patient, max_loaded=2)) as fleet:
        fleet.until(lambda x: x["state"] == "ready")
        yield fleet
    patch.undo()


@pytest.mark.multiprocess
def test_one_that_hangs_is_ended(local: Running) -> None:
    (worker,) = local.model("c")["workers"]
    os.kill(worker["pid"], signal.SIGSTOP)
    local.until(lambda x: x["models"][2]["workers"][0]["starts"] == 2)
    local.until(lambda x: x["models"][2]["state"] == "loaded")
    assert not alive(worker["pid"])
    assert local.post("/v1/completions", {"model": "c", "prompt": "a"}).status_code == 200


@pytest.mark.multiprocess
def test_nothing_of_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    with running(FleetConfig((ModelConfig("m", "stories", options=SMALL),), front())) as fleet:
        fleet.until(lambda x: x["state"] == "ready")


@pytest.mark.multiprocess
def test_models_that_are_busy_are_waited_for(local: Running) -> None:
    """There is room for one of the two: requests to both are answered, one model's after the
    other's."""
    bodies = [{"model": x, "prompt": "a", "max_tokens": 400, "ignore_eos": True} for x in "abab"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda x: local.post("/v1/completions", x), bodies))
    assert [x.status_code for x in answers] == [200] * 4


@pytest.mark.multiprocess
def test_rest_begins_when_it_is_ready() -> None:
    model = ModelConfig("m", "stories", (0, 1), SMALL, idle_timeout_s=0.5)
    with running(FleetConfig((model,), front())) as fleet:
        fleet.post("/models/load", {"model": "m"})
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        fleet.until(lambda x: not x["models"][0]["workers"])


@pytest.mark.multiprocess
def test_adapters_of_a_model_that_is_not_loaded() -> None:
    options = (*SMALL, "--lora-modules=verse=stories-verse")
    with running(FleetConfig((ModelConfig("m", "stories", (0, 1), options),), front())) as fleet:
        assert [x["id"] for x in fleet.get("/v1/models")["data"]] == ["m", "verse"]
        answer = fleet.post("/v1/completions", {"model": "verse", "prompt": "a", "max_tokens": 2})
        assert (answer.status_code, answer.json()["model"]) == (200, "verse")


def test_ensembles_are_not_loaded(server: Server) -> None:
    config = FleetConfig((elsewhere(server.url),), front(), ensembles=(ENSEMBLE,))
    with running(config) as fleet:
        for path in ("/models/load", "/models/unload"):
            answer = fleet.post(path, {"model": "both"})
            assert (answer.status_code, "is an ensemble" in answer.text) == (400, True)


def test_keys_are_in_the_log(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.server")
    with before(scripted) as fleet:
        fleet.post("/v1/completions", PROMPT, **{"x-request-id": "mine"})
    (said,) = (
        x.fields for x in caplog.records if getattr(x, "fields", {}).get("request_id") == "mine"
    )  # type: ignore[attr-defined]
    assert (said["key"], said["worker"]) == ("everybody", "stories/0")


@pytest.mark.multiprocess
def test_unloading_twice_breaks_nothing_off(local: Running) -> None:
    body = {**LONG, "model": "a"}
    with local.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(3):
            assert local.post("/models/unload", {"model": "a"}).status_code == 200
        assert [x for x in lines if x][-1] == "data: [DONE]"
    local.until(lambda x: not x["models"][0]["workers"])
    assert "continued_streams_total{" not in local.text("/metrics")


@pytest.mark.multiprocess
def test_who_leaves_while_room_is_made(local: Running) -> None:
    local.post("/v1/completions", {"model": "a", "prompt": "a", "max_tokens": 1})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{local.url}/v1/completions", json={"model": "b", "prompt": "a"}, timeout=0.03
        )  # fmt: skip
    local.until(lambda x: not x["models"][0]["workers"])  # it is gone nevertheless
    answer = local.post("/v1/completions", {"model": "b", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    assert local.get("/fleet")["models"][0]["workers"] == []


def test_an_engine_that_has_stopped() -> None:
    """Its process is still there, and says so: it is ended, and started again."""
    ended: list[str] = []

    async def run() -> None:
        from penstock.fleet.worker import LocalWorker

        worker = LocalWorker("m/0", "m", Path("/x"), (), None, 1.0, lambda: None)
        worker.become("ready")

        async def get(path: str, timeout_s: float) -> tuple[int, Any]:
            return (503, {"reason": "The engine has stopped"})

        worker.link.get = get  # type: ignore[method-assign]
        worker._give_up = ended.append  # type: ignore[method-assign]
        await worker.probe()
        assert worker.state == "unready"

    asyncio.run(run())
    assert ended == ["The engine has stopped"]


def test_errors_of_a_lease() -> None:
    async def run() -> None:
        async def none(group: Group) -> None:
            raise ApiError(503, "All are busy.", code="models_busy")

        group = group_of(ModelConfig("m", "stories", (0, 1)), none)
        with pytest.raises(ApiError, match="All are busy"):
            await group.lease(Ask.of("/v1/completions", b"{}", ()), set())
        assert (group.waiting, group.queued) == (0, 0)

    asyncio.run(run())


__all__ = ["scripted"]

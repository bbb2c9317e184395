"""Instances as processes: started, killed, restarted, ended; `penstock fleet` as a whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import Result

from penstock.cpus import usable_cpus
from penstock.fleet.config import FleetConfig, ModelConfig
from tests.fleet.conftest import Running, front, running
from tests.fleet.test_continuing import said

pytestmark = pytest.mark.multiprocess

RUN = [sys.executable, "-c", "from penstock.cli.main import run; run()", "fleet"]
SMALL = ("--num-gpu-blocks-override=128",)
LONG = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "temperature": 0,
        "stream": True}  # fmt: skip
FILE = """
max_loaded = 2
[[model]]
name = "twice"
model = "stories"
instances = 2
{cpus}
options = ["--num-gpu-blocks-override=128"]
[[model]]
name = "rare"
model = "stories-chat"
instances = [0, 1]
options = ["--num-gpu-blocks-override=128"]
[[model]]
name = "rarer"
model = "stories"
instances = [0, 1]
idle_timeout_s = 1
options = ["--num-gpu-blocks-override=128"]
"""


class Process:
    """`penstock fleet` and what it says."""

    def __init__(self, *arguments: str) -> None:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_API")}
        self.popen = subprocess.Popen(
            [*RUN, "--port=0", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=variables,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    def ready(self) -> str:
        end = time.monotonic() + 90
        while time.monotonic() < end and self.popen.poll() is None:
            found = next((x for x in self.lines if " ready url=" in x and "|" not in x), None)
            if found:
                match = re.search(r"url=(http://\S+)", found)
                assert match is not None
                return match[1]
            time.sleep(0.05)
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        code = self.popen.wait(60)
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        return code


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    one = Process(*arguments)
    try:
        yield one
    finally:
        if one.popen.poll() is None:
            one.popen.kill()
        one.end()


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    file.write_text(FILE.format(cpus='cpus = "split"' if len(usable_cpus()) > 1 else ""))
    with process(str(file)) as one:
        yield Running(one.ready(), None)  # type: ignore[arg-type]


def workers(fleet: Running, model: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.model(model)["workers"]
    return found


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds} s")
        time.sleep(0.05)


def kill_while_it_answers(fleet: Running, body: dict[str, Any]) -> list[Any]:
    """All events of an answer whose instance is killed when some of it is here."""
    events: list[Any] = []
    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        name = answer.headers["x-penstock-worker"]
        for i, line in enumerate(answer.iter_lines()):
            if line.startswith("data: "):
                events.append(line[6:])
            if i == 40:
                pids = {x["name"]: x["pid"] for x in workers(fleet, body["model"])}
                os.kill(pids[name], signal.SIGKILL)
    return [x if x == "[DONE]" else json.loads(x) for x in events]


@pytest.mark.quick
def test_a_killed_instance_loses_nothing(there: Running) -> None:
    body = {**LONG, "model": "twice"}
    expected = said(there.stream("/v1/completions", body))
    assert said(kill_while_it_answers(there, body)) == expected
    there.until(lambda x: len([w for w in x["models"][0]["workers"] if w["state"] == "ready"]) == 2)
    assert sorted(x["starts"] for x in workers(there, "twice")) == [1, 2]


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="has one CPU")
def test_instances_have_cpus_of_their_own(there: Running) -> None:
    there.until(lambda x: all(w["state"] == "ready" for w in x["models"][0]["workers"]))
    sets = [os.sched_getaffinity(x["pid"]) for x in workers(there, "twice")]
    assert not sets[0] & sets[1]
    assert sets[0] | sets[1] == set(usable_cpus())


def test_models_are_loaded_when_they_are_asked_for(there: Running) -> None:
    assert there.model("rare")["state"] == "unloaded"
    body = {"model": "rare", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    assert there.post("/v1/chat/completions", body).status_code == 200
    (rare,) = workers(there, "rare")
    # there is room for two, and one of them always runs
    answer = there.post("/v1/completions", {"model": "rarer", "prompt": "A", "max_tokens": 2})
    assert answer.status_code == 200
    assert there.model("rare")["state"] == "unloaded"
    assert not alive(rare["pid"])
    (rarer,) = workers(there, "rarer")
    until(lambda: there.model("rarer")["state"] == "unloaded")  # it has rested for a second
    until(lambda: not alive(rarer["pid"]))


def test_models_are_loaded_and_unloaded_by_hand(there: Running) -> None:
    assert there.post("/models/load", {"model": "rare"}).json() == {"success": True}
    until(lambda: there.model("rare")["state"] == "loaded")
    assert there.post("/models/load", {"model": "rare"}).json() == {"success": True}
    assert len(workers(there, "rare")) == 1
    assert there.post("/models/unload", {"model": "rare"}).json() == {"success": True}
    until(lambda: there.model("rare")["state"] == "unloaded")
    answer = there.post("/models/unload", {"model": "twice"})
    assert (answer.status_code, "always has 2" in answer.text) == (400, True)


def test_it_restarts_alone(there: Running) -> None:
    """A model's only instance is killed while it answers: it comes back and goes on."""
    body = {**LONG, "model": "rare"}
    expected = said(there.stream("/v1/completions", body))
    assert said(kill_while_it_answers(there, body)) == expected


def test_term_lets_answers_end(tmp_path: Path) -> None:
    with process("m=stories", "--no-log-requests") as one:
        fleet = Running(one.ready(), None)  # type: ignore[arg-type]
        (worker,) = workers(fleet, "m")
        with fleet.client() as client, client.stream(
            "POST", "/v1/completions", json={**LONG, "model": "m"}
        ) as answer:  # fmt: skip
            lines = answer.iter_lines()
            next(lines)
            one.popen.send_signal(signal.SIGTERM)
            assert [x for x in lines if x][-1] == "data: [DONE]"
        assert one.popen.wait(30) == 0
        assert not alive(worker["pid"])
        assert not Path(worker["url"].removeprefix("unix:")).parent.exists()


def test_instances_end_with_their_fleet() -> None:
    with process("m=stories") as one:
        (worker,) = workers(Running(one.ready(), None), "m")  # type: ignore[arg-type]
        one.popen.kill()
        until(lambda: not alive(worker["pid"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("m=/nowhere",), "The model 'm' can't run. Its process ended with 1: "),
        (("m=stories", "--instances=n=2"), "--instances has 'n', and no model is named so"),
        (("m=stories", "--instances=m:2"), "write NAME=2, NAME=0-3, or 2"),
        (("m=stories", "--instances=2", "--instances=3"), "says twice how many of every model"),
        (("m=stories", "--num-cpus=4"), 'Give it ray = "auto", or --ray.'),
        (
            ("m=stories", "--ray=auto", "--num-cpus=n=4"),
            "--num-cpus has 'n', and no model is named",
        ),
        (("m=stories", "--ray=auto", "--num-cpus=m=a"), "--num-cpus is 'm=a'; write NAME=4, or 4"),
        (("m=stories", "--num-cpus=2", "--num-cpus=3"), "says twice how many of every model"),
        (("m=stories", "--ray=auto", "--num-cpus=0"), "--num-cpus is 0"),
        (("m=stories", "--ray=here"), "--ray is 'here'; it must be auto, local, or HOST:PORT"),
        (("x.toml", "--num-cpus=2"), "--num-cpus is for models that are named"),
        (("m=stories", "--max-loaded=0"), "--max-loaded is 0"),
        (("m=stories", "--start-timeout=0"), "--start-timeout is 0"),
        (("m=stories", "--policy=best"), "--policy is 'best'"),
        (("m=stories", "m=stories-chat"), "named 'm'"),
        (("x.toml", "m=stories"), "give it alone"),
        (("x.toml",), "can't be read"),
        (("m=http://a",), "named in a fleet's file"),
        (("m=stories", "--tokens-per-minute=3"), "a fleet doesn't count"),
        (("m=stories", "--host=0.0.0.0"), "there is no API key"),
        (("m=stories", "--uds=/x", "--port=1"), "--uds is given"),
    ],
)
def test_what_is_wrong(
    penstock: Callable[..., Result],
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.server.logs.configure", lambda kind: None)
    port = () if any("--uds" in x or "--port" in x for x in arguments) else ("--port=0",)
    found = penstock("fleet", *arguments, *port)
    assert found.exit_code == 1
    assert said in found.output


def test_an_option_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[model]]\nname = "m"\nmodel = "stories"\noptions = ["--quantisation=w4a8"]')
    with process(str(file)) as one:
        assert one.popen.wait(60) == 1
        one.end()
        assert (
            "error: The model 'm' can't run. Its process ended with 2: No such option: "
            in (one.lines[-1])
        )


def test_demand_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.group.SCALE_UP_S", 0.2)
    options = (*SMALL, "--max-num-seqs=1")
    model = ModelConfig("m", "stories", (1, 2), options, idle_timeout_s=0.5)
    with running(FleetConfig((model,), front())) as fleet:
        fleet.until(lambda x: x["state"] == "ready")
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                httpx.post(f"{fleet.url}/v1/completions", json={**LONG, "stream": False},
                           timeout=60)  # fmt: skip

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        fleet.until(lambda x: len([w for w in x["models"][0]["workers"] if w["starts"]]) == 2)
        fleet.until(lambda x: [w["state"] for w in x["models"][0]["workers"]] == ["ready"] * 2)
        stop.set()
        for thread in threads:
            thread.join()
        fleet.until(lambda x: x["models"][0]["instances"] == 1)
        (left,) = fleet.until(lambda x: len(x["models"][0]["workers"]) == 1)["models"][0]["workers"]
        assert left["state"] == "ready"


def test_a_model_that_fails_when_it_is_asked_for() -> None:
    good = ModelConfig("m", "stories", options=SMALL)
    bad = ModelConfig("bad", "/nowhere", (0, 1))
    with running(FleetConfig((good, bad), front())) as fleet:
        fleet.until(lambda x: x["state"] == "ready")
        for _ in range(2):  # the second one isn't made to wait for another try
            answer = fleet.post("/v1/completions", {"model": "bad", "prompt": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "model_failed")
            assert "'bad' can't be loaded. Its process ended with 1" in error["message"]
        assert fleet.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        entry = fleet.get("/v1/models/bad")
        assert entry["status"]["value"] == "failed"

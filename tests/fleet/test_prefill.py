"""Long prompts that one instance computes for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet.ask import LIMITS, Ask
from penstock.fleet.choosing import ByPrefix
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.folders import OwnFolder
from penstock.fleet.link import Link
from penstock.fleet.transfer import ExchangeFolder
from penstock.fleet.worker import Worker
from penstock.server.sse import dumps
from tests.fleet.conftest import Running, elsewhere, front, running
from tests.fleet.test_fleet_routes import Scripted, scripted
from tests.server.conftest import Running as Server

TEXT = "Once upon a time there was a little dog named Max. He liked to run in the park. " * 12
SMALL = ("--num-gpu-blocks-override=64",)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
}


@pytest.fixture(scope="module")
def apart() -> Iterator[Running]:
    model = ModelConfig(
        "stories", "stories", options=SMALL, prefill=1, prefill_from=500, prefill_space=0.5
    )
    with running(FleetConfig((model,), front())) as fleet:
        fleet.until(lambda x: x["state"] == "ready")
        yield fleet


def counted(fleet: Running, name: str) -> dict[str, float]:
    """A metric by its only label that isn't the model's."""
    lines = [x for x in fleet.text("/metrics").splitlines() if x.startswith(f"{name}{{")]
    return {
        x.split('"')[1] if "engine=" in x else x.split('"')[3]: float(x.rpartition(" ")[2])
        for x in lines
    }


def made(fleet: Running) -> float:
    return counted(fleet, "penstock_fleet:prefills_total").get("200", 0.0)


def text_of(answer: Any) -> Any:
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice.get("text") or choice["message"]["content"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    return answer["content"][0]["text"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("path", BODIES)
def test_the_answer_is_the_same(apart: Running, server: Server, path: str) -> None:
    body = {"model": "stories", "temperature": 0, LIMITS[path]: 20, **BODIES[path]}
    before = made(apart)
    answer = apart.post(path, {**body, "cache_salt": path})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-worker"] == "stories/0"
    assert made(apart) == before + 1
    with server.client() as client:
        assert text_of(answer.json()) == text_of(client.post(path, json=body).json())
    read = counted(apart, "penstock:prefix_disk_blocks_read_total")
    assert read["0"] > read["p0"] == 0
    computed = counted(apart, "vllm:prompt_tokens_total")
    again = apart.post(path, {**body, "cache_salt": path})  # it is known there by now
    assert text_of(again.json()) == text_of(answer.json())
    assert made(apart) == before + 1
    assert counted(apart, "vllm:prompt_tokens_total")["p0"] == computed["p0"]


@pytest.mark.multiprocess
def test_streams_and_samples(apart: Running, server: Server) -> None:
    body = {"model": "stories", "prompt": "So. " + TEXT, "n": 2, "seed": 3, "max_tokens": 8,
            "logprobs": 1, "stream": True, "stream_options": {"include_usage": True},
            "stop": ["x"]}  # fmt: skip
    before = made(apart)
    events = apart.stream("/v1/completions", body)
    assert made(apart) == before + 1
    with running(FleetConfig((elsewhere(server.url),), front())) as plain:
        plain.until(lambda x: x["models"][0]["state"] == "loaded")
        expected = plain.stream("/v1/completions", body)

    def texts(found: list[Any]) -> list[str]:
        choices = [choice for data in found[:-1] for choice in data["choices"]]
        return ["".join(x["text"] for x in choices if x["index"] == i) for i in range(2)]

    assert texts(events) == texts(expected)
    assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 200


@pytest.mark.multiprocess
def test_short_prompts_are_not_worth_it(apart: Running) -> None:
    before = made(apart)
    answer = apart.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
    assert answer.status_code == 200
    asked = {"prompt": TEXT * 8, "max_tokens": 2}  # longer than the model reads
    assert apart.post("/v1/completions", asked).json()["error"]["code"] == "context_length_exceeded"
    assert made(apart) == before
    own = {"kv_transfer_params": {"do_remote_prefill": True}, "prompt": "x" + TEXT, "max_tokens": 1}
    assert apart.post("/v1/completions", own).status_code == 200
    assert made(apart) == before


@pytest.mark.multiprocess
def test_without_those_who_compute(apart: Running) -> None:
    """They are a help, not a need."""
    (worker,) = apart.model("stories")["prefill"]["workers"]
    assert worker["name"] == "stories/p0"
    os.kill(worker["pid"], signal.SIGKILL)
    answer = apart.post("/v1/completions", {"prompt": "Well. " + TEXT, "max_tokens": 2})
    assert answer.status_code == 200
    apart.until(lambda x: x["models"][0]["prefill"]["workers"][0]["state"] == "ready")
    before = made(apart)
    apart.post("/v1/completions", {"prompt": "Oh. " + TEXT, "max_tokens": 2})
    assert made(apart) == before + 1


def test_elsewhere(scripted: Scripted) -> None:
    far = Scripted()
    try:
        model = elsewhere(scripted.url, prefill_workers=(far.url,), prefill_from=100)
        with running(FleetConfig((model,), front())) as fleet:
            fleet.until(lambda x: x["models"][0]["prefill"]["state"] == "loaded")
            fleet.until(lambda x: x["models"][0]["state"] == "loaded")
            body = {"model": "stories", "prompt": TEXT, "max_tokens": 9, "temperature": 0, "n": 2}
            assert fleet.post("/v1/completions", body).json() == {"ok": True}
            assert far.asked[0][2] == {
                "model": "stories", "prompt": TEXT, "max_tokens": 1, "temperature": 0,
                "kv_transfer_params": {"do_remote_decode": True},
            }  # fmt: skip
            assert scripted.asked[0][2] == body
            far.answer = (400, {"error": {"message": "No."}}, {})
            assert fleet.post("/v1/completions", {**body, "prompt": "A" + TEXT}).status_code == 200
            far.answer = (200, b"x", {"content-length": "10", "connection": "close"})
            assert fleet.post("/v1/completions", {**body, "prompt": "B" + TEXT}).status_code == 200
            outcomes = counted(fleet, "penstock_fleet:prefills_total")
            assert outcomes == {"200": 1, "400": 1, "broken": 1}
            fleet.until(lambda x: x["running"] == 0)
            assert fleet.model("stories")["prefill"]["outstanding"] == 0
    finally:
        far.close()


def test_what_is_asked_of_them() -> None:
    data = {"messages": [], "max_completion_tokens": 9, "stream": True, "logprobs": True,
            "response_format": {"type": "json_object"}, "tools": [], "n": 3}  # fmt: skip
    one = Ask.of("/v1/chat/completions", dumps(data).encode(), ())
    transfer = {"do_remote_decode": True}
    asked = {"messages": [], "tools": [], "max_tokens": 1, "kv_transfer_params": transfer}
    assert one.prefill().data == asked
    assert one.may_be_handed_over
    assert not Ask.of("/tokenize", b"{}", ()).may_be_handed_over
    for fields in (
        {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"truncation": "auto"},
        {"kv_transfer_params": {}}, {"context_management": [{"type": "compaction"}]},
    ):  # fmt: skip
        asked = {"prompt": "a", **fields}
        assert not Ask.of("/v1/completions", dumps(asked).encode(), ()).may_be_handed_over


def test_sizes_of_prompts() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 9999}}
    text = {"type": "text", "text": "y" * 100_000}
    messages = [{"role": "user", "content": [picture, text]}]
    one = Ask.of("/v1/chat/completions", dumps({"messages": messages}).encode(), ())
    assert 100_000 <= one.size < 100_100
    assert Ask.of("/v1/completions", dumps({"prompt": [7] * 100}).encode(), ()).size == 400
    first, second = (
        Ask.of("/v1/completions", dumps({"prompt": "z" * 70_000 + c * 400_000}).encode(), ())
        for c in "ab"
    )
    chooser = ByPrefix()
    worker = Worker("m/0", "m", Link("unix:/x"), lambda: None)
    chooser.choose([worker], first)
    assert 0.1 < chooser.knows([worker], second) < 0.2  # what follows isn't known


def test_those_who_compute_have_limits(scripted: Scripted) -> None:
    """What they can't compute at once is computed where it is answered; nobody waits for them."""
    far = Scripted()
    try:
        far.wait_s = 1.0
        model = elsewhere(scripted.url, prefill_workers=(far.url,), prefill_from=100)
        with running(FleetConfig((model,), front())) as fleet:
            fleet.until(lambda x: x["models"][0]["prefill"]["state"] == "loaded")
            fleet.until(lambda x: x["models"][0]["state"] == "loaded")

            def ask(i: int) -> int:
                body = {"model": "stories", "prompt": f"{i} {TEXT}", "n": 3}
                return fleet.post("/v1/completions", body).status_code

            with ThreadPoolExecutor(12) as pool:
                assert set(pool.map(ask, range(12))) == {200}
            assert len(far.asked) == 4  # of one sequence each, as many as it computes at once
            assert len(scripted.asked) == 12
    finally:
        far.close()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.folders._SHARED_MEMORY", tmp_path)
    folder = ExchangeFolder()
    one = folder.of("a/b")
    assert one.parent.parent == tmp_path
    assert one.parent.stat().st_mode & 0o777 == 0o700
    assert 0 < folder.space(0.001, 1) <= 0.001
    assert folder.space(1e9, 2) == pytest.approx(folder.space(1e9, 1) / 2, rel=0.1)
    (one / "id").mkdir()
    (one / "id" / "block.kv").write_text("")
    folder.clear()
    assert not list(one.glob("*/*"))
    folder.remove()
    assert not one.parent.exists()


@pytest.mark.multiprocess
def test_what_killed_fleets_left_goes(tmp_path: Path) -> None:
    """And nothing else: neither what is in use nor what isn't ours."""
    code = (
        "import sys, time; from pathlib import Path; from penstock.fleet.folders import OwnFolder; "
        f"one = OwnFolder('x', Path({str(tmp_path)!r})); print(one.path, flush=True); "
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (tmp_path / "x-notes").mkdir()
        old = tmp_path / "x-made-again"
        old.mkdir()
        os.utime(old, (0, 0))
        mine = OwnFolder("x", tmp_path)
        assert (theirs / ".lock").exists()
        other.kill()
        other.wait()
        another = OwnFolder("x", tmp_path)
        assert sorted(x.name for x in tmp_path.iterdir()) == sorted(
            [mine.path.name, another.path.name, "x-notes"]
        )
        for one in (mine, another):
            one.remove()
    assert [x.name for x in tmp_path.iterdir()] == ["x-notes"]


__all__ = ["scripted"]

"""What a fleet answers: its models' endpoints, its own, and errors in the shape of the API."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.ensemble import Ensemble, Stage
from penstock.server import Key, Limits
from tests.fleet.conftest import Pair, Running, elsewhere, front, running
from tests.server.conftest import Running as Server

PROMPT = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]


class Scripted:
    """A server elsewhere that answers as a test says."""

    def __init__(self, name: str = "stories") -> None:
        self.name = name
        self.ready = (200, {"status": "ready"})
        self.answer: tuple[int, Any, dict[str, str]] = (200, {"ok": True}, {})
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.wait_s = 0.0
        self._go = threading.Event()
        self._go.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                match self.path:
                    case "/ready":
                        self._say(*outer.ready)
                    case "/load":
                        self._say(200, {"server_load": 0, "capacity": 4})
                    case "/v1/models":
                        self._say(200, {"data": [{"id": outer.name}]})
                    case _:
                        self._say(404, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {k.lower(): v for k, v in self.headers.items()}
                outer.asked.append((self.path, headers, json.loads(body or b"null")))
                time.sleep(outer.wait_s)
                outer._go.wait(60)
                self._say(*outer.answer)

            def _say(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                usual = {"content-type": "application/json", "content-length": str(len(body))}
                for field, value in (usual | (headers or {})).items():
                    self.send_header(field, value)
                self.end_headers()
                with suppress(OSError):  # who asked has left
                    self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its answers wait for the end of this."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    one = Scripted()
    yield one
    one.close()


@contextmanager
def fleet_of(*models: ModelConfig, **fields: Any) -> Iterator[Running]:
    server = fields.pop("server", front())
    with running(FleetConfig(models, server, **fields)) as found:
        yield found


@contextmanager
def before(scripted: Scripted, **fields: Any) -> Iterator[Running]:
    """A fleet of one scripted server, which it has found."""
    with fleet_of(elsewhere(scripted.url), **fields) as fleet:
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        yield fleet


def test_a_clients_library(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"{pair.fleet.url}/v1", api_key="none")
    with client:
        assert [model.id for model in client.models.list()] == ["stories"]
        chat = client.chat.completions.create(model="stories", messages=HELLO, max_tokens=8)  # type: ignore[call-overload]
        assert chat.choices[0].message.content
        stream = client.completions.create(**PROMPT, stream=True)  # type: ignore[call-overload]
        text = "".join(x.choices[0].text for x in stream)
        assert text == client.completions.create(**PROMPT).choices[0].text  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError, match="isn't served here"):
            client.completions.create(**{**PROMPT, "model": "x"})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "stories", "input": "Hello", "max_output_tokens": 5}),
        ("/v1/messages", {"model": "stories", "messages": HELLO, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"model": "stories", "messages": HELLO}),
        ("/v1/responses/input_tokens", {"model": "stories", "input": "Hello"}),
        ("/v1/embeddings", {"model": "stories", "input": "Hello"}),
        ("/tokenize", {"model": "stories", "prompt": "Hello"}),
        ("/detokenize", {"model": "stories", "tokens": [5, 6]}),
    ],
)
def test_every_endpoint(pair: Pair, path: str, body: dict[str, Any]) -> None:
    answer = pair.fleet.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-worker"] in ("stories/0", "stories/1")
    with pair.server.client() as client:
        expected = client.post(path, json=body).json()
    assert answer.json().keys() == expected.keys()


def test_refusals_come_through(pair: Pair) -> None:
    answer = pair.fleet.post("/v1/completions", {**PROMPT, "temperature": -1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    stream = pair.fleet.post("/v1/completions", {**PROMPT, "n": -1, "stream": True})
    assert stream.status_code == 400
    wrong = pair.fleet.post("/v1/messages", {"model": "stories", "messages": [], "max_tokens": 1})
    assert wrong.json()["type"] == "error"
    with pair.fleet.client(headers={"content-type": "text/plain"}) as client:
        assert client.post("/v1/completions", content=json.dumps(PROMPT)).status_code == 415
        assert client.post("/v1/completions", content=b"{").json()["error"]["code"] == (
            "invalid_json"
        )
        assert client.get("/v1/completions").status_code == 405
        assert (
            client.get("/nothing").json()["error"]["message"] == "There is nothing at GET /nothing."
        )


def test_models_and_health(pair: Pair) -> None:
    (entry,) = pair.fleet.get("/v1/models")["data"]
    assert entry["status"] == {"value": "loaded"}
    assert entry["max_model_len"] == 1024
    assert pair.fleet.get("/v1/models/stories") == entry
    assert pair.fleet.get("/v1/models/x")["error"]["code"] == "model_not_found"
    assert pair.fleet.get("/health") == {"status": "ok"}
    assert pair.fleet.get("/ready") == {"status": "ready"}
    assert pair.fleet.get("/load") == {"server_load": 0, "demand": 0.0}
    assert set(pair.fleet.get("/version")) == {"version"}
    answer = pair.fleet.post("/reset_prefix_cache", None)
    assert answer.json() == {"status": "ok", "workers": {"stories/0": 200, "stories/1": 200}}
    for path in ("/models/load", "/models/unload"):
        told = pair.fleet.post(path, {"model": "stories"})
        assert (told.status_code, "runs elsewhere" in told.text) == (400, True)
        assert pair.fleet.post(path, {"model": "x"}).status_code == 404
        assert pair.fleet.post(path, {"modle": "x"}).status_code == 400


def test_metrics(pair: Pair) -> None:
    pair.fleet.post("/v1/completions", PROMPT)
    families = {x.name: x for x in text_string_to_metric_families(pair.fleet.text("/metrics"))}
    instances = {x.labels["state"]: x.value for x in families["penstock_fleet:instances"].samples}
    assert instances["ready"] == 2
    assert {x.labels["engine"] for x in families["penstock:demand"].samples} == {"0", "1"}
    assert {x.labels["engine"] for x in families["vllm:time_to_first_token_seconds"].samples} == {
        "0",
        "1",
    }
    asked = families["penstock_fleet:worker_requests"].samples
    assert sum(x.value for x in asked if x.labels.get("outcome") == "200") > 0


def test_headers(scripted: Scripted) -> None:
    with before(scripted) as fleet:
        answer = fleet.post(
            "/v1/completions", PROMPT,
            **{"x-request-id": "mine", "traceparent": "00-a", "authorization": "Bearer secret",
               "cookie": "a=b", "x-api-key": "secret"},
        )  # fmt: skip
        assert answer.headers["x-request-id"] == "mine"
    ((_, headers, body),) = scripted.asked
    assert body == PROMPT
    assert headers["x-request-id"] == "mine"
    assert headers["traceparent"] == "00-a"
    assert not {"authorization", "cookie", "x-api-key"} & headers.keys()


def test_a_key_for_elsewhere(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "sk-far")
    with fleet_of(elsewhere(scripted.url, api_key_env="FAR_KEY")) as fleet:
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        fleet.post("/v1/completions", PROMPT)
    assert scripted.asked[0][1]["authorization"] == "Bearer sk-far"


def test_keys_and_limits(scripted: Scripted) -> None:
    limits = Limits(max_concurrency=1, requests_per_minute=3, priority=7)
    keys = (Key.of("sk-a", "alice", limits), Key.of("sk-b", "bob"))
    with before_with_keys(scripted, keys) as fleet:
        assert fleet.post("/v1/completions", PROMPT).status_code == 401
        alice, bob = ({"authorization": f"Bearer sk-{x}"} for x in "ab")
        assert fleet.post("/v1/completions", PROMPT, **alice).status_code == 200
        assert scripted.asked[-1][2] == {"priority": 7, **PROMPT}
        too_many = fleet.post("/v1/completions", {**PROMPT, "n": 2}, **alice)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        for _ in range(2):
            assert fleet.post("/v1/completions", PROMPT, **alice).status_code == 200
        over = fleet.post("/v1/completions", PROMPT, **alice)
        assert (over.status_code, "retry-after" in over.headers) == (429, True)
        assert fleet.post("/v1/completions", PROMPT, **bob).status_code == 200
        assert scripted.asked[-1][2] == PROMPT


@contextmanager
def before_with_keys(scripted: Scripted, keys: tuple[Key, ...]) -> Iterator[Running]:
    config = FleetConfig((elsewhere(scripted.url),), front(keys=keys))
    with running(config, authorization="Bearer sk-b") as fleet:
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        fleet.headers = {}
        yield fleet


def test_one_at_a_time_of_a_key(scripted: Scripted) -> None:
    with before(scripted, server=front(limits=Limits(max_concurrency=1))) as fleet:
        thread = threading.Thread(target=fleet.post, args=("/v1/completions", PROMPT))
        with scripted.held():
            thread.start()
            fleet.until(lambda x: x["running"] == 1)
            assert fleet.post("/v1/completions", PROMPT).status_code == 429
        thread.join()
        assert fleet.post("/v1/completions", PROMPT).status_code == 200


def test_a_request_that_takes_too_long(scripted: Scripted) -> None:
    with before(scripted, server=front(request_timeout_s=0.2)) as fleet, scripted.held():
        answer = fleet.post("/v1/completions", PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        fleet.until(lambda x: x["running"] == 0 and x["models"][0]["outstanding"] == 0)


def test_who_leaves_frees_his_place(scripted: Scripted) -> None:
    with before(scripted) as fleet, scripted.held():
        with fleet.client(), pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{fleet.url}/v1/completions", json=PROMPT, timeout=0.2)
        fleet.until(lambda x: x["running"] == 0 and x["models"][0]["outstanding"] == 0)


def test_busy_comes_through_and_dying_does_not(scripted: Scripted) -> None:
    other = Scripted()
    try:
        models = (elsewhere(scripted.url, other.url),)
        with fleet_of(*models, policy="round_robin") as fleet:
            fleet.until(lambda x: len([w for w in x["models"][0]["workers"] if w["capacity"]]) == 2)
            error = {"error": {"message": "Going.", "code": "server_draining"}}
            scripted.answer = (503, error, {"x-penstock-code": "server_draining"})
            scripted.ready = (503, {"reason": "The server is draining."})
            for _ in range(4):
                answer = fleet.post("/v1/completions", PROMPT)
                assert (answer.status_code, answer.headers["x-penstock-worker"]) == (
                    200,
                    "stories/1",
                )
            told = fleet.until(lambda x: x["models"][0]["workers"][0]["state"] == "unready")
            assert "draining" in told["models"][0]["workers"][0]["reason"]
            scripted.ready = (200, {})
            fleet.until(lambda x: x["models"][0]["workers"][0]["state"] == "ready")
            busy = {"error": {"message": "Full.", "code": "queue_full"}}
            scripted.answer = other.answer = (429, busy, {"retry-after": "3"})
            answer = fleet.post("/v1/completions", PROMPT)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json() == busy
            scripted.answer = other.answer = (503, busy, {"retry-after": "4"})
            answer = fleet.post("/v1/completions", PROMPT)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "4")
            assert answer.json()["error"]["code"] == "queue_full"
            said = {"type": "error", "error": {"type": "overloaded_error", "message": "Full."}}
            scripted.answer = other.answer = (503, said, {"x-penstock-code": "queue_full"})
            answer = fleet.post("/v1/messages", {"max_tokens": 1, "messages": HELLO})
            told = answer.json()
            assert {k: told[k] for k in said} == said  # and the request's id
            assert answer.headers["x-penstock-code"] == "queue_full"
    finally:
        other.close()


def test_instances_that_break_again_and_again(scripted: Scripted) -> None:
    """A request that breaks whoever gets it doesn't go on for ever."""
    with before(scripted, max_attempts=2) as fleet:
        scripted.answer = (200, b"x", {"content-length": "10", "connection": "close"})
        answer = fleet.post("/v1/completions", PROMPT)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "worker_lost")
        assert "2 instances of 'stories' broke while they answered" in error["message"]
        assert len(scripted.asked) == 2


@pytest.mark.parametrize("said", [b"HTTP/0.9 nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b""])
def test_who_speaks_no_http(said: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.sendall(said)
            one.close()

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        with fleet_of(elsewhere(f"http://127.0.0.1:{listener.getsockname()[1]}")) as fleet:
            time.sleep(0.5)
            assert fleet.get("/fleet")["models"][0]["workers"][0]["state"] != "ready"
            assert fleet.get("/ready")["status"] == "not ready"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.group.ELSEWHERE_S", 0.3)
    with fleet_of(elsewhere("http://127.0.0.1:1")) as fleet:
        answer = fleet.post("/v1/completions", PROMPT)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "model_not_ready")
        assert "within 0.3 s" in error["message"]


def test_another_name(scripted: Scripted) -> None:
    scripted.name = "other"
    with fleet_of(elsewhere(scripted.url)) as fleet:
        told = fleet.until(lambda x: x["models"][0]["workers"][0]["state"] == "unready")
        reason = told["models"][0]["workers"][0]["reason"]
        assert reason == "It serves other, not 'stories': name the model as it does."


ENSEMBLE = Ensemble(
    "both",
    (
        Stage("start", "stories", "Write about {input}", parameters={"max_tokens": 8, "seed": 1}),
        Stage("more", "stories", "{input} {input}", system="Be kind.",
              parameters={"max_tokens": 4}),
        Stage("end", "stories", "Join {start} and {more}", parameters={"max_tokens": 6}),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def several(server: Server) -> Iterator[Running]:
    with fleet_of(elsewhere(server.url), ensembles=(ENSEMBLE,)) as fleet:
        fleet.until(lambda x: x["models"][0]["state"] == "loaded")
        yield fleet


class TestEnsembles:
    def ask(self, fleet: Running, model: str, content: Any, **fields: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "temperature": 0, **fields}
        return fleet.post("/v1/chat/completions", body).json()

    def test_stage_after_stage(self, several: Running) -> None:
        def said(prompt: str, **fields: Any) -> str:
            answer = self.ask(several, "stories", prompt, **fields)
            text: str = answer["choices"][0]["message"]["content"]
            return text

        # stages before the last have their own parameters, not the caller's
        system = {"role": "system", "content": "Be kind."}
        question = {"role": "user", "content": "a dog a dog"}
        start = several.post("/v1/chat/completions", {
            "model": "stories", "max_tokens": 8, "seed": 1,
            "messages": [{"role": "user", "content": "Write about a dog"}],
        }).json()["choices"][0]["message"]["content"]  # fmt: skip
        assert ENSEMBLE.rounds == [list(ENSEMBLE.stages[:2]), [ENSEMBLE.stages[2]]]
        asked: list[Any] = []
        more = several.post("/v1/chat/completions", {
            "model": "stories", "max_tokens": 4, "messages": [system, question], "temperature": 0,
        }).json()["choices"][0]["message"]["content"]  # fmt: skip
        greedy = Ensemble("both", (
            ENSEMBLE.stages[0],
            Stage("more", "stories", "{input} {input}", system="Be kind.",
                  parameters={"max_tokens": 4, "temperature": 0}),
            ENSEMBLE.stages[2],
        ))  # fmt: skip
        several.fleet.ensembles["both"] = greedy
        answer = self.ask(several, "both", "a dog")
        assert answer["choices"][0]["message"]["content"] == said(
            f"Join {start} and {more}", max_tokens=6
        )
        assert answer["usage"]["completion_tokens"] <= 6
        assert not asked

    def test_streams_and_parts(self, several: Running) -> None:
        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "dog"}]
        body = {
            "model": "both", "messages": [{"role": "user", "content": parts}], "temperature": 0,
            "stream": True, "max_tokens": 3,
        }  # fmt: skip
        events = several.stream("/v1/chat/completions", body)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"  # the caller's counts for more

    def test_it_is_listed(self, several: Running) -> None:
        entry = several.get("/v1/models/both")
        assert entry["stages"] == [[x.name, "stories"] for x in ENSEMBLE.stages]
        assert entry["status"] == {"value": "loaded"}

    def test_what_it_cannot(self, several: Running) -> None:
        for wrong in (None, [], [{"type": "image_url"}], 3):
            error = self.ask(several, "both", wrong)["error"]
            assert error["param"] == "messages"
        body = {"model": "both", "prompt": "x"}
        error = several.post("/v1/completions", body).json()["error"]
        assert "is asked at /v1/chat/completions" in error["message"]
        assert self.ask(several, "both", "x", tools=[{}])["error"]["param"] == "tools"

    def test_a_stage_that_is_refused(self, several: Running) -> None:
        answer = self.ask(several, "both", "dog " * 5000)
        assert answer["error"]["code"] == "context_length_exceeded"
        # two stages are asked at once, and either may be refused first
        assert re.match("The stage '(start|more)' of 'both': ", answer["error"]["message"])
        several.until(lambda x: x["running"] == 0 and x["models"][0]["outstanding"] == 0)


def test_demand(scripted: Scripted) -> None:
    with before(scripted) as fleet:
        assert fleet.model("stories")["demand"] == 0
        threads = [
            threading.Thread(target=fleet.post, args=("/v1/completions", {**PROMPT, "n": 3}))
            for _ in range(2)
        ]
        with scripted.held():
            for thread in threads:
                thread.start()
            found = fleet.until(lambda x: x["models"][0]["outstanding"] == 6)["models"][0]
            assert found["demand"] == 6 / 4
            assert found["wanted"] == math.ceil(6 / (4 * 0.75)) == 2
            text = fleet.text("/metrics")
            assert 'penstock_fleet:demand{model_name="stories"} 1.5' in text
            assert 'penstock_fleet:instances_wanted{model_name="stories"} 2.0' in text
        for thread in threads:
            thread.join()


class TestThePage:
    def test_its_files(self, pair: Pair) -> None:
        with pair.fleet.client() as client, pair.server.client() as other:
            for path in ("/", "/page/main.js"):
                found = client.get(path)
                assert (found.status_code, found.content) == (200, other.get(path).content)
            assert client.get("/page/none.js").status_code == 404

    def test_its_figures(self, server: Server) -> None:
        config = FleetConfig((elsewhere(server.url),), replace(front(), page=True))
        with running(config) as fleet:
            fleet.until(lambda x: x["models"][0]["state"] == "loaded")
            with fleet.client() as client:
                with client.stream("GET", "/page/events?model=stories") as answer:
                    lines = (x for x in answer.iter_lines() if x.startswith("data: "))
                    found = [json.loads(next(lines)[6:]) for _ in range(2)]
                assert [x["model"] for x in found] == ["stories"] * 2
                assert client.get("/page/events?model=none").status_code == 404
            fleet.until(lambda x: not fleet.fleet.groups["stories"].ready[0].link._busy)

    def test_nobody_to_show(self) -> None:
        with fleet_of(elsewhere("http://127.0.0.1:1")) as fleet:
            answer = fleet.get("/page/events")
            assert answer["error"]["code"] == "model_not_ready"

    def test_it_can_be_left_out(self, scripted: Scripted) -> None:
        off = replace(front(), page=False)
        with before(scripted, server=off) as fleet, fleet.client() as client:
            assert client.get("/").status_code == 404

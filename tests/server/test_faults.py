"""Bodies and paths that are wrong: a 4xx in the API's own shape, and the server goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from penstock.server.body import MAX_DEPTH, read_json
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import ChatRequest
from penstock.server.protocol.completions import CompletionRequest
from penstock.server.protocol.embeddings import EmbeddingRequest
from penstock.server.protocol.messages import CountTokensRequest, MessagesRequest
from penstock.server.protocol.responses import ResponsesRequest
from penstock.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.conftest import IDS, Running

ASK = [{"role": "user", "content": "Tell me about a little dog."}]
MILLION = 10**6
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Once", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": ASK, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Once", "max_output_tokens": 1}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Once"}),
    "/v1/messages": (MessagesRequest, {"model": "stories", "messages": ASK, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": "stories", "messages": ASK}),
    "/tokenize": (TokenizeRequest, {"prompt": "Once"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
JSON = {"content-type": "application/json"}
PATHS = pytest.mark.parametrize("path", ENDPOINTS)


def refused(answer: httpx.Response, path: str, status: int = 400) -> str:
    """The message of an answer that must be an error of this status."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["type"] in (
            "invalid_request_error",
            "not_found_error",
            "permission_error",
        )
    return str(body["error"]["message"])


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BAD_BODIES = {
    "cut off": (b'{"prompt": "a', "JSON"),
    "empty": (b"", "missing"),
    "null": (b"null", "The body is"),
    "a list": (b"[]", "The body is"),
    "a text": (b'"a"', "The body is"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', "isn't UTF-8"),
    "UTF-16": (json.dumps({"prompt": "a"}).encode("utf-16"), "isn't UTF-8"),
    "a lone surrogate": (b'{"prompt": "a\\ud800b"}', "surrogate U+D800"),
    "a surrogate as a field": (b'{"\\udfff": 1}', "surrogate U+DFFF"),
    "NaN": (b'{"temperature": NaN}', "NaN isn't a number"),
    "-Infinity": (b'{"temperature": -Infinity}', "-Infinity isn't a number"),
    "nested lists": (b'{"a": ' + nested(10_000) + b"}", "nested deeper"),
    "nested objects": (b'{"a":' * 2_000 + b"1" + b"}" * 2_000, "nested deeper"),
    "an integer of 5,000 digits": (b'{"n": ' + b"9" * 5_000 + b"}", "digits"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "'prompt' is in one object twice"),
}


@PATHS
@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_is_no_request(server: Running, path: str, what: str) -> None:
    content, said = BAD_BODIES[what]
    with server.client() as client:
        assert said in refused(client.post(path, content=content, headers=JSON), path)


@PATHS
def test_a_wrong_content_type(server: Running, path: str) -> None:
    body = json.dumps(ENDPOINTS[path][1]).encode()
    with server.client() as client:
        answer = client.post(path, content=body, headers={"content-type": "text/plain"})
        assert "'text/plain'" in refused(answer, path, 415)
        assert "Content-Type" in refused(client.post(path, content=body), path, 415)


@PATHS
def test_every_field_of_a_wrong_type(server: Running, path: str) -> None:
    """None of these is a value of any field but where it says so; no answer is a 5xx."""
    model, body = ENDPOINTS[path]
    wrong: list[Any] = [
        {"x": 1}, [{"x": [1]}], [None], "\x00", -1, 10**400, 10**30, 1e308, True, [], "", [[]],
    ]  # fmt: skip
    fields = sorted({*model.model_fields, *model.unsupported} - {"stream", "max_tokens"})
    with server.client() as client:
        for field in fields:
            for value in wrong:
                answer = client.post(path, json={**body, field: value})
                assert answer.status_code < 500, (field, value, answer.text)
                if answer.status_code != 200:
                    refused(answer, path, answer.status_code)
            answer = client.post(path, json={**body, field: {"x": 1}})
            open_fields = ("chat_template_kwargs", "documents", "metadata", "logit_bias")
            open_fields += ("client_metadata",)
            open_fields += ("guided_json",)  # a schema may hold keywords that nobody knows
            if field not in open_fields:
                refused(answer, path)
        unknown = refused(client.post(path, json={**body, "temprature": 1, "zzz": 2}), path)
        assert "'temprature' isn't a field" in unknown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 10**400), ("temperature", 1e999), ("top_p", -1), ("n", 10**400),
        ("max_tokens", 10**400), ("min_tokens", 10**30), ("logprobs", 10**30),
        ("priority", 10**30), ("ttft_slo_ms", 1e999), ("ttft_slo_ms", 0),
        ("stop_token_ids", [10**30]), ("allowed_token_ids", [2**63]), ("allowed_token_ids", [-1]),
        ("logit_bias", {"9" * 30: 1}), ("logit_bias", {"1_0": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1e999}), ("prompt", [10**30]), ("prompt", [IDS]), ("prompt", [-1]),
        ("prompt", [1, "a"]), ("prompt", [[]]), ("prompt", []), ("prompt", [1.5]),
        ("truncate_prompt_tokens", 0), ("cache_salt", ""), ("stop", [""]), ("request_id", "a\nb"),
    ],
)  # fmt: skip
def test_numbers_out_of_their_range(server: Running, field: str, value: Any) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 2, field: value})
    with server.client() as client:
        content = body.replace("Infinity", "1e999").encode()
        message = refused(client.post("/v1/completions", content=content, headers=JSON), "")
        assert message


def test_an_empty_prompt_is_the_token_before_a_text(server: Running) -> None:
    asked = {"prompt": "", "max_tokens": 2, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 1
        plain = client.post("/v1/completions", json={**asked, "add_special_tokens": False})
        assert "The prompt is empty" in refused(plain, "prompt")
        assert refused(client.post("/v1/embeddings", json={"input": ""}), "input")


def test_what_the_engine_refuses_has_a_status_in_a_stream_too(server: Running) -> None:
    with server.client() as client:
        for path, more in (
            ("/v1/chat/completions", {"n": 500}),
            ("/v1/chat/completions", {"allowed_token_ids": [IDS]}),
            ("/v1/completions", {"allowed_token_ids": [IDS]}),
            ("/v1/responses", {"allowed_token_ids": [IDS]}),
        ):
            body = {**ENDPOINTS[path][1], **more, "stream": True}
            refused(client.post(path, json=body), path)


# ── large ────────────────────────────────────────────────────────────────────────────────────

LARGE: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "a prompt of 10^6 words": (
        "/v1/completions",
        lambda: {"prompt": "dog " * MILLION},
        "characters",
    ),
    "… to be cut": (
        "/v1/completions",
        lambda: {"prompt": "dog " * MILLION, "truncate_prompt_tokens": -1},
        "characters",
    ),
    "10^6 token ids": ("/v1/completions", lambda: {"prompt": [5] * MILLION}, "1,000,000 tokens"),
    "10^6 ids and a word": (
        "/v1/completions",
        lambda: {"prompt": [5] * MILLION + ["a"]},
        "prompt[1000000]",
    ),
    "10^6 wrong ids": ("/v1/completions", lambda: {"prompt": [-5] * MILLION}, "prompt[0]"),
    "10^6 numbers": ("/v1/completions", lambda: {"prompt": [0.5] * MILLION}, "Give a text"),
    "10^5 prompts": ("/v1/completions", lambda: {"prompt": ["a"] * 10**5}, "100,000 prompts"),
    "10^5 stop strings": (
        "/v1/completions",
        lambda: {"stop": [f"s{i}" for i in range(10**5)]},
        "100,000 strings",
    ),
    "10^5 bad words": (
        "/v1/completions",
        lambda: {"bad_words": [f"s{i}" for i in range(10**5)]},
        "100,000 strings",
    ),
    "a long bad word": (
        "/v1/completions",
        lambda: {"bad_words": ["dog " * 10**5]},
        "400,000 characters",
    ),
    "10^5 biases": (
        "/v1/completions",
        lambda: {"logit_bias": {str(i): 1 for i in range(10**5)}},
        "100,000 token ids",
    ),
    "10^5 wrong biases": (
        "/v1/completions",
        lambda: {"logit_bias": {str(i): "x" for i in range(10**5)}},
        "must be a number",
    ),
    "10^5 fields": (
        "/v1/completions",
        lambda: {f"f{i}": 1 for i in range(10**5)},
        "'f0' isn't a field",
    ),
    "10^6 words in a chat": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "user", "content": "dog " * MILLION}]},
        "characters",
    ),
    "10^4 messages": ("/v1/chat/completions", lambda: {"messages": ASK * 10**4}, "10,000 messages"),
    "10^4 wrong messages": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "nobody"}] * 10**4},
        "messages[0].role",
    ),
    "10^6 words for Anthropic": (
        "/v1/messages",
        lambda: {"messages": [{"role": "user", "content": "dog " * MILLION}]},
        "characters",
    ),
    "10^6 words to count": ("/tokenize", lambda: {"prompt": "dog " * MILLION}, "characters"),
    "10^6 wrong tokens": ("/detokenize", lambda: {"tokens": [-5] * MILLION}, "tokens[0]"),
    "10^5 labels": (
        "/v1/responses",
        lambda: {"metadata": {str(i): "x" for i in range(10**5)}},
        "100,000 entries",
    ),
}


@pytest.mark.parametrize("what", LARGE)
def test_too_much_of_something(server: Running, what: str) -> None:
    path, made, said = LARGE[what]
    more = made()
    with server.client() as client:
        start = time.monotonic()
        answer = client.post(path, json={**ENDPOINTS[path][1], **more})
        assert said in refused(answer, path)
        assert time.monotonic() - start < 10  # a second or less, but machines are shared


MANY: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "lists": ("/v1/completions", lambda: b'{"prompt":[%b[1]]}' % (b"[1]," * 7_000_000), "lists"),
    "objects": ("/v1/chat/completions", lambda: b'{"a":[%b1]}' % (b"{}," * 8_000_000), "lists"),
    "numbers": (
        "/v1/completions",
        lambda: b'{"prompt":[%b1]}' % (b"1," * 15_000_000),
        "15,000,000 values",
    ),
    "members": (
        "/v1/completions",
        lambda: json.dumps({"logit_bias": {str(i): 1 for i in range(1_500_000)}}).encode(),
        "1,500,001 texts",
    ),
    "tokens": (
        "/detokenize",
        lambda: b'{"tokens":[%b1]}' % (b"1," * 8_000_000),
        "8,000,000 values",
    ),
    "templates": (
        "/v1/chat/completions",
        lambda: b'{"messages":[],"chat_template_kwargs":{"x":[%b1]}}' % (b'{"a":1},' * 3_400_000),
        "texts",
    ),
    "an open text": ("/v1/completions", lambda: b'{"prompt":"' + b"[," * 15_000_000, "JSON"),
}


@pytest.mark.parametrize("what", MANY)
def test_others_are_answered_while_a_huge_body_is_refused(server: Running, what: str) -> None:
    """Read in full, each of these would stop the event loop for 2 to 15 s."""
    path, made, said = MANY[what]
    content = made()
    done = threading.Event()
    waits: list[float] = []

    def others() -> None:
        with server.client() as client:
            while not done.is_set():
                start = time.monotonic()
                assert client.get("/version").status_code == 200
                waits.append(time.monotonic() - start)

    other = threading.Thread(target=others)
    other.start()
    try:
        with server.client() as client:
            answer = client.post(path, content=content, headers=JSON)
    finally:
        done.set()
        other.join()
    status = 400 if said == "JSON" else 413
    assert said in refused(answer, path, status)
    assert max(waits) < 1.5  # a few tenths, but machines are shared


def test_old_turns_of_a_long_conversation_are_left_out_quickly(server: Running) -> None:
    turns = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"dog {i}"} for i in range(4001)
    ]
    body = {"messages": turns, "max_tokens": 1, "truncation": "auto"}
    with server.client() as client:
        start = time.monotonic()
        response = client.post("/v1/chat/completions", json=body)
        assert time.monotonic() - start < 10
    answer, dropped = response.json(), int(response.headers["X-Penstock-Dropped-Messages"])
    assert 3900 < dropped < 4001
    most = server.llm.engine.max_model_len
    # One more pair of turns wouldn't have fitted.
    pair = 2 * len(server.service.prompts.of_text("dog 3999", add_special_tokens=False).tokens) + 16
    assert most - 1 - pair < answer["usage"]["prompt_tokens"] < most
    with server.client() as client:
        short = client.post("/v1/chat/completions", json=body | {"messages": turns[-1:]})
        assert "X-Penstock-Dropped-Messages" not in short.headers
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
            assert stream.headers["X-Penstock-Dropped-Messages"] == str(dropped)
            stream.read()


def test_a_body_beyond_the_limit(server: Running) -> None:
    most = server.service.config.max_body_bytes
    with server.client() as client:

        def pieces() -> Any:  # chunked: nobody says how much comes
            for _ in range(most // (1 << 20) + 1):
                yield b" " * (1 << 20)

        answer = client.post("/v1/completions", content=pieces(), headers=JSON)
        assert "are read" in refused(answer, "", 413)


# ── paths, methods, headers ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404), ("POST", "/v1/messages/nope", 404), ("GET", "/docs", 404),
        ("GET", "/v1/models/nope", 404), ("GET", "/v1/models/%00%0a%ff", 404),
        ("GET", "/page/%2e%2e/x", 404), ("GET", "/%ff", 404),
        ("GET", "/v1/completions", 405), ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/messages", 405), ("TRACE", "/health", 405), ("POST", "/health", 405),
        ("OPTIONS", "/v1/completions", 405), ("PATCH", "/tokenize", 405),
    ],
)  # fmt: skip
def test_unknown_paths_and_methods(server: Running, method: str, path: str, status: int) -> None:
    with server.client() as client:
        refused(client.request(method, path), path, status)


@pytest.mark.parametrize("host", ["[", "[::1", "evil.example", "a" * 5000, ""])
def test_hosts_that_are_none(server: Running, host: str) -> None:
    with server.client() as client:
        message = refused(client.get("/health", headers={"host": host}), "", 403)
        assert len(message) < 500


# ── templates ────────────────────────────────────────────────────────────────────────────────

GIVEN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt",
         "continue_final_message", "self")  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_templates_own_arguments_cant_be_set(server: Running, name: str) -> None:
    body = {"messages": ASK, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}
    with server.client() as client:
        assert repr(name) in refused(client.post("/v1/chat/completions", json=body), "")


@pytest.mark.parametrize("name", ["bos_token", "range", "loop", "namespace", "raise_exception"])
def test_other_variables_stay_data(server: Running, name: str) -> None:
    for value in (1, "x" * 10_000, {"a": [None]}, [[]]):
        body = {"messages": ASK, "max_tokens": 1, "chat_template_kwargs": {name: value}}
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=body).status_code in (200, 400)


def test_a_requests_own_template_is_refused(server: Running) -> None:
    body = {"messages": ASK, "max_tokens": 1, "chat_template": "x"}
    with server.client() as client:
        message = refused(client.post("/v1/chat/completions", json=body), "")
        assert "--trust-request-chat-template" in message
        refused(client.post("/tokenize", json={"messages": ASK, "chat_template": "x"}), "")


# ── reading JSON ─────────────────────────────────────────────────────────────────────────────


def test_what_is_json_is_read() -> None:
    text = '{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00\\n€"], "b": {"a": {}}}'
    assert read_json(text.encode()) == json.loads(text)
    assert read_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    with pytest.raises(ApiError, match="deeper"):
        read_json(nested(MAX_DEPTH + 1))

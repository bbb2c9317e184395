"""Real answers beside the OpenAPI document, which has every field that they have and no other."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from penstock.server import Key, ServerConfig, create_app
from tests.server.conftest import Running

ASK = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": ASK, "max_tokens": 3}
WORDS = {"prompt": "Once upon", "max_tokens": 3}
ANSWER = {"input": "Hi", "max_output_tokens": 3}
MESSAGE = {"model": "stories", "messages": ASK, "max_tokens": 3}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1, "logprobs": True,
                                     "top_logprobs": 2, "prompt_logprobs": 1,
                                     "return_token_ids": True}),
    ("/v1/chat/completions", CHAT | {"stop": [" "]}),
    ("/v1/completions", WORDS),
    ("/v1/completions", WORDS | {"prompt": ["a", "b"], "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", WORDS | {"logprobs": 1, "echo": True}),
    ("/v1/completions", WORDS | {"prompt_logprobs": 1, "stop_token_ids": [300]}),
    ("/v1/responses", ANSWER),
    ("/v1/responses", ANSWER | {"top_logprobs": 2, "metadata": {"a": "b"}, "user": "u",
                                "instructions": "Be kind."}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"stop_sequences": [" "]}),
    ("/v1/messages/count_tokens", {"model": "stories", "messages": ASK}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [300]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get("/openapi.json").json()
    return found


@pytest.mark.parametrize(("path", "body"), CASES)
def test_answers_are_as_the_document_says(
    server: Running, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    described = document["paths"][path]["post"]["responses"]["200"]
    schema = described["content"]["application/json"]["schema"]
    assert schema
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = {**schema, "components": document["components"]}
    jsonschema_rs.Draft202012Validator(whole).validate(answer.json())
    for name, resolved in document["components"]["schemas"].items():
        if name in str(schema):
            assert resolved["additionalProperties"] is False


def test_errors_are_as_the_document_says(server: Running, document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        described = document["paths"][path]["post"]["responses"]["400"]
        schema = described["content"]["application/json"]["schema"]
        with server.client() as client:
            answer = client.post(path, json={})
        whole = {**schema, "components": document["components"]}
        jsonschema_rs.Draft202012Validator(whole).validate(answer.json())


def test_a_response_has_its_own_kind_of_id(server: Running) -> None:
    with server.client() as client:
        answer = client.post("/v1/responses", json=ANSWER, headers={"x-request-id": "a-b"}).json()
        assert answer["id"].startswith("resp_a-b-")
        assert answer["output"][0]["id"].startswith("msg_a-b-")
        events = client.post("/v1/responses", json=ANSWER | {"stream": True}).text
    ids = {json.loads(line[6:]).get("response", {}).get("id")
           for line in events.splitlines() if line.startswith("data: ")}  # fmt: skip
    assert len(ids - {None}) == 1
    assert all(one.startswith("resp_") for one in ids - {None})


def test_messages_say_what_penstock_adds(server: Running) -> None:
    with server.client() as client:
        whole = client.post("/v1/messages", json=MESSAGE).json()
        events = client.post("/v1/messages", json=MESSAGE | {"stream": True}).text
    (delta,) = [json.loads(line[6:]) for line in events.splitlines()
                if line.startswith('data: {"type":"message_delta"')]  # fmt: skip
    names = {"queue_s", "ttft_s", "tokens_per_s", "floor_s", "floor_ratio", "bound"}
    names |= {"draft_tokens", "accepted_tokens"}
    assert whole["penstock"].keys() == delta["penstock"].keys() == names
    assert whole["penstock"]["ttft_s"] > 0


def test_how_clients_tell_who_they_are(document: dict[str, Any]) -> None:
    locked = create_app(ServerConfig(keys=(Key.of("one", "first"),))).openapi()
    for said in (document, locked):
        schemes = said["components"]["securitySchemes"]
        assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
        assert schemes["key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}
        assert said["paths"]["/health"]["get"]["security"] == []
    assert locked["security"] == [{"bearer": []}, {"key": []}]
    assert document["security"] == [{}, *locked["security"]]

"""Responses that are kept and gone on from, through the official client and over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from penstock.server import ServerConfig, Service
from penstock.server.keys import Key
from penstock.server.stored import StoredResponses
from tests.server.conftest import Running, serving
from tests.server.tools.conftest import TERSE
from tests.server.tools.test_chat import SHORT

LEAST: Any = {"model": "stories", "input": "Tell me of a dog.", "max_output_tokens": 8,
              "temperature": 0}  # fmt: skip
F: Any = {"type": "function", "name": "f", "parameters": SHORT, "strict": True}


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(server: Running, monkeypatch: pytest.MonkeyPatch) -> StoredResponses:
    stored = StoredResponses(1 << 20, 3600)
    monkeypatch.setattr(server.service, "stored", stored)
    return stored


def asked(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{**LEAST, **fields})


def posted(server: Running, **fields: Any) -> Any:
    return httpx.post(f"{server.v1}/responses", json={**LEAST, **fields}, timeout=60)


def said(error: Any) -> tuple[int, str | None, str | None]:
    return error.value.status_code, error.value.param, error.value.code


@contextmanager
def prompts(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[list[str]]:
    """Those of the requests that end within this."""
    config = replace(server.service.config, log_prompts=True)
    monkeypatch.setattr(server.service, "config", config)
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock.server"):
        yield found
        server.rest()
    all_fields = (getattr(x, "fields", {}) for x in caplog.records)
    found += [fields["prompt"] for fields in all_fields if "prompt" in fields]


def test_a_client_goes_on_from_a_response(
    server: Running,
    client: OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is the same as to send all that was said, and most of it is in the cache."""
    with prompts(server, monkeypatch, caplog) as seen:
        first = asked(client, input="Tell me of a dog. " * 10, max_output_tokens=24)
        second = asked(client, input="And then?", previous_response_id=first.id)
        third = asked(client, input=[{"role": "user", "content": "Why?"}],
                      previous_response_id=second.id)  # fmt: skip
        whole: Any = [
            {"role": "user", "content": "Tell me of a dog. " * 10},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "And then?"},
            *(item.model_dump() for item in second.output),
            {"role": "user", "content": "Why?"},
        ]
        same = asked(client, input=whole, store=False)
    assert seen[2] == seen[3]
    assert seen[1].startswith(seen[0])
    assert (first.previous_response_id, second.previous_response_id) == (None, first.id)
    assert (first.store, same.store) == (True, False)
    assert same.output_text == third.output_text
    assert second.usage.input_tokens_details.cached_tokens > 32
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens


def test_what_is_kept_comes_back_as_it_was(client: OpenAI, server: Running) -> None:
    first = asked(client, instructions="Be kind.", metadata={"a": "b"}, tools=[F])
    assert client.responses.retrieve(first.id) == first
    events = list(client.responses.create(**LEAST, previous_response_id=first.id, stream=True))
    last = events[-1].response  # type: ignore[union-attr]
    assert client.responses.retrieve(last.id) == last
    assert (last.store, last.previous_response_id) == (True, first.id)
    assert events[0].response.store is True  # type: ignore[union-attr]
    cut = asked(client, max_output_tokens=1)
    assert client.responses.retrieve(cut.id).status == cut.status == "incomplete"
    head = posted(server).headers["x-penstock-stored"]
    assert httpx.get(f"{server.v1}/responses/{head}").json()["id"] == head


def test_input_items(client: OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}], "id": "msg_own"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
    ]
    first = asked(client, input=items)
    second = asked(client, input="And then?", previous_response_id=first.id)
    listing = client.responses.input_items.list
    latest = listing(second.id).data
    oldest = listing(second.id, order="asc").data
    assert [x.id for x in latest] == [x.id for x in oldest][::-1]
    assert [x.type for x in oldest] == [
        "message", "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert len({x.id for x in oldest}) == 6
    assert oldest[1].id == "msg_own"
    assert oldest[0].content[0].text == "Be brief."
    assert (oldest[2].name, oldest[2].namespace) == ("f", "n")
    assert oldest[4].id == first.output[0].id
    assert oldest[5].content[0].text == "And then?"
    assert [x.id for x in listing(second.id, order="asc", limit=2)] == [x.id for x in oldest]
    page = listing(second.id, order="asc", limit=2, after=oldest[2].id)
    assert [x.id for x in page.data] == [oldest[3].id, oldest[4].id]
    assert page.has_more
    assert listing(second.id, after=oldest[0].id).data == []
    assert [x.id for x in listing(first.id, order="asc").data] == [x.id for x in oldest[:4]]
    for wrong in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"limit": 10**30}, {"after": "x"}):
        with pytest.raises(openai.BadRequestError) as refused:
            listing(first.id, **wrong)  # type: ignore[arg-type]
        assert refused.value.param == next(iter(wrong))


def test_references_stand_for_items(
    server: Running,
    client: OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = asked(client)
    (own,) = client.responses.input_items.list(first.id).data
    names = [own.id, first.output[0].id]
    with prompts(server, monkeypatch, caplog) as seen:
        end = {"role": "user", "content": "Why?"}
        given: Any = [{"type": "item_reference", "id": name} for name in names]
        second = asked(client, input=[*given, end])
        asked(client, input="Why?", previous_response_id=first.id)
    assert seen[0] == seen[1]
    client.responses.delete(first.id)  # what was referred to is kept with what refers to it
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert [x.id for x in kept[:2]] == names
    for gone in (names[0], "msg_x", "x" * 5000):
        with pytest.raises(openai.BadRequestError, match="Item with id") as refused:
            asked(client, input=[{"type": "item_reference", "id": gone}, end])
        assert said(refused) == (400, "input", "item_not_found")
    with pytest.raises(openai.BadRequestError, match="has no id"):
        asked(client, input=[{"type": "item_reference"}])


def test_the_instructions_of_before_do_not_carry_over(
    server: Running,
    client: OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with prompts(server, monkeypatch, caplog) as seen:
        first = asked(client, instructions="Be kind.")
        asked(client, previous_response_id=first.id)
        asked(client, previous_response_id=first.id, instructions="Be brief.")
    assert ["Be kind." in text for text in seen] == [True, False, False]
    assert "Be brief." in seen[2]


def test_what_is_not_kept_is_not_found(client: OpenAI, fresh: StoredResponses) -> None:
    own = asked(client, store=False)
    assert own.store is False
    assert fresh.count == 0
    for name in (own.id, "resp_x", "x" * 250):
        with pytest.raises(openai.BadRequestError) as refused:
            asked(client, previous_response_id=name)
        assert said(refused) == (400, "previous_response_id", "previous_response_not_found")
        assert f"Previous response with id '{name[:80]}' not found." in refused.value.message
        for method in (client.responses.retrieve, client.responses.delete,
                       client.responses.input_items.list):  # fmt: skip
            with pytest.raises(openai.NotFoundError) as missing:
                method(name)
            assert said(missing) == (404, None, "response_not_found")


def test_what_is_deleted_is_gone(server: Running, client: OpenAI) -> None:
    first = asked(client)
    second = asked(client, previous_response_id=first.id)
    answer = httpx.delete(f"{server.v1}/responses/{first.id}")
    assert answer.json() == {"id": first.id, "object": "response", "deleted": True}
    assert httpx.delete(f"{server.v1}/responses/{first.id}").status_code == 404
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError, match="goes on from, not found") as refused:
        asked(client, previous_response_id=second.id)
    assert said(refused) == (400, "previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError, match="goes on from, not found"):
        client.responses.input_items.list(second.id)


def test_others_make_way(server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    size = asked(client) and server.service.stored.size  # type: ignore[union-attr]
    stored = StoredResponses(2 * size + size // 2, 3600)
    monkeypatch.setattr(server.service, "stored", stored)
    first, second, third = (asked(client) for _ in range(3))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    for kept in (second, third):
        assert client.responses.retrieve(kept.id).id == kept.id
    large = {"role": "user", "content": [{"type": "input_text", "text": ""}] * (size // 12)}
    assert asked(client, input=[large]).store is False
    with pytest.raises(openai.BadRequestError, match="--response-store-mib") as refused:
        asked(client, input=[large] * 3, store=True)
    assert refused.value.param == "store"
    assert asked(client, input=[large] * 3).store is False
    assert stored.count == 2


def test_a_server_that_keeps_nothing_says_so(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "stored", None)
    assert asked(client).store is False
    assert "x-penstock-stored" not in posted(server).headers
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError, match="store: false") as refused:
            asked(client, **fields)
        assert said(refused) == (400, param, "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="This server keeps no responses"):
        client.responses.retrieve("resp_x")
    assert Service(ServerConfig(response_store_mib=0)).stored is None


def test_each_key_has_its_own() -> None:
    keys = (Key.of("one", "one"), Key.of("two", "two"))
    with serving(ServerConfig(keys=keys), model="stories") as running:
        with (OpenAI(base_url=running.v1, api_key="one", max_retries=0) as one,
              OpenAI(base_url=running.v1, api_key="two", max_retries=0) as two):  # fmt: skip
            first = asked(one)
            for method in (two.responses.retrieve, two.responses.delete,
                           two.responses.input_items.list):  # fmt: skip
                with pytest.raises(openai.NotFoundError):
                    method(first.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                asked(two, previous_response_id=first.id)
            reference: Any = [{"type": "item_reference", "id": first.output[0].id}]
            with pytest.raises(openai.BadRequestError, match="not found"):
                asked(two, input=reference)
            assert asked(one, previous_response_id=first.id).store
        assert httpx.get(f"{running.v1}/responses/{first.id}").status_code == 401


def test_a_call_goes_on_with_its_result(client: OpenAI, server: Running, monkeypatch: Any) -> None:
    from penstock.server.tools.plan import Tooling

    config = replace(server.service.config, tool_call_parser="hermes", chat_template=TERSE)
    made = Tooling(server.service.prompts.tokenizer, config)
    monkeypatch.setattr(server.service, "config", config)
    monkeypatch.setattr(server.service, "tooling", made)
    space: Any = {"type": "namespace", "name": "n", "tools": [F]}
    first = asked(client, tools=[space], tool_choice="required", max_output_tokens=120)
    (call,) = first.output
    assert (call.type, call.namespace) == ("function_call", "n")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = asked(client, input=[result], previous_response_id=first.id)
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert [x.type for x in kept] == ["message", "function_call", "function_call_output"]
    broken = next(
        event.response
        for event in client.responses.create(
            **{**LEAST, "max_output_tokens": 16}, tools=[space], tool_choice="required", stream=True
        )
        if event.type == "response.incomplete"
    )
    assert any(x.type == "function_call" and x.status == "incomplete" for x in broken.output)
    assert asked(client, input="Go on.", previous_response_id=broken.id).output


def test_compactions_stand_in_a_chain(client: OpenAI) -> None:
    turn = "A long walk by the sea with a dog. " * 6
    first = asked(client, input=turn)
    before, compacted = first, 0
    when: Any = [{"type": "compaction", "compact_threshold": 300}]
    for _ in range(8):
        before = asked(client, input=turn, previous_response_id=before.id, context_management=when)
        spent = before.model_extra["penstock"].get("compaction")
        compacted += before.output[0].type == "compaction"
        tokens = before.usage.input_tokens - (spent or {"input_tokens": 0})["input_tokens"]
        assert tokens <= 300
    assert compacted > 1
    count = client.responses.input_tokens.count
    chained = count(model="stories", input="Yes?", previous_response_id=before.id).input_tokens
    assert count(model="stories", input="Yes?").input_tokens < chained <= 400
    shorter = client.responses.compact(model="stories", previous_response_id=before.id, input=turn)
    assert shorter.output[-1].type == "compaction"


def test_what_failed_is_not_kept(
    server: Running, fresh: StoredResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, *given: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("penstock.server.routes.responses._Answer._usage", broken)
    assert posted(server).status_code == 500
    assert "response.completed" not in posted(server, stream=True).text
    assert fresh.count == 0


def test_what_its_client_left_is_not_kept(server: Running, fresh: StoredResponses) -> None:
    asked: Any = {**LEAST, "max_output_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.v1}/responses", json=asked, timeout=60) as answer:
        next(answer.iter_bytes())
    server.rest()
    assert fresh.count == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"previous_response_id": ["resp_x"]}, "previous_response_id"),
        ({"previous_response_id": {"id": "x"}}, "previous_response_id"),
        ({"previous_response_id": "x" * 1_000_000}, "previous_response_id"),
        ({"previous_response_id": "../../models"}, "previous_response_id"),
        ({"previous_response_id": "resp_\u0000"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"store": 1}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": 7}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}] * 1000}, "input"),
    ],
)
def test_hostile_fields(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = posted(server, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert len(answer.text) < 1000


def test_nothing_grows_beyond_a_body(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often one item is referred to, and however long a conversation gets."""
    first = asked(client, input="A dog. " * 100)
    (own,) = client.responses.input_items.list(first.id).data
    config = replace(server.service.config, max_body_bytes=5000)
    monkeypatch.setattr(server.service, "config", config)
    many: Any = [{"type": "item_reference", "id": own.id}] * 9
    with pytest.raises(openai.BadRequestError, match="that are referred to have") as refused:
        asked(client, input=many, truncation="auto")
    assert said(refused) == (400, "input", "context_length_exceeded")
    assert asked(client, input=many[:5], truncation="auto").store
    long: dict[str, Any] = {"input": "A cat. " * 200, "truncation": "auto"}
    before = first
    for _ in range(3):
        before = asked(client, **long, previous_response_id=before.id)
    with pytest.raises(
        openai.BadRequestError, match="that it names 5,960 bytes; at most"
    ) as too_long:
        asked(client, **long, previous_response_id=before.id)
    assert said(too_long) == (400, "previous_response_id", "context_length_exceeded")
    others = [asked(client, input="A cow. " * 300).output[0].id for _ in range(3)]
    items: Any = [{"type": "item_reference", "id": name} for name in others]
    with pytest.raises(openai.BadRequestError, match=r"that it names \S+ bytes") as too_many:
        asked(client, input=items, truncation="auto")  # to find them all of each is read
    assert said(too_many) == (400, "input", "context_length_exceeded")


def test_without_an_input(server: Running, client: OpenAI) -> None:
    """A kept conversation goes on, is counted and is summed up as it is."""
    first = asked(client)
    least = {k: v for k, v in LEAST.items() if k != "input"}
    assert client.responses.create(**least, previous_response_id=first.id).output
    counted = client.responses.input_tokens.count(
        model=LEAST["model"], previous_response_id=first.id
    )
    assert counted.input_tokens > 0
    with pytest.raises(openai.BadRequestError, match="'input' is missing") as missing:
        client.responses.create(**least)
    assert said(missing) == (400, "input", "missing_required_parameter")


def test_queries_that_nobody_reads(server: Running, client: OpenAI) -> None:
    first = asked(client)
    path = f"{server.v1}/responses/{first.id}"
    assert httpx.get(f"{path}?stream=true").json()["error"]["code"] == "unsupported_parameter"
    assert httpx.get(f"{path}?steam=true").json()["error"]["code"] == "unknown_parameter"
    assert httpx.get(f"{path}/input_items?before=x").status_code == 400
    shown = httpx.get(f"{path}?include[]=message.output_text.logprobs")
    assert (shown.status_code, shown.headers["x-penstock-unheeded"]) == (200, "include")
    assert httpx.post(path, json={}).status_code == 405


def test_metrics_and_the_document(server: Running, client: OpenAI) -> None:
    asked(client)
    text = httpx.get(f"{server.url}/metrics").text
    found = [x for x in text.splitlines() if x.startswith("penstock:stored_")]
    assert len(found) == 2
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert set(document["paths"]["/v1/responses/{response_id}"]) == {"get", "delete"}
    assert json.dumps(document["paths"]["/v1/responses/{response_id}/input_items"])

"""What an answer has beyond its fields: it can be sent back, counted, echoed and cut to fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from penstock.server import ServerConfig
from tests.server.conftest import LENGTH, Running, serving

CHAT = [{"role": "user", "content": "Tell me of a dog. Please!"}]
_open = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    with _open:
        yield


def openai_at(server: Running) -> OpenAI:
    return _open.enter_context(OpenAI(api_key="none", base_url=server.v1))


def anthropic_at(server: Running) -> Anthropic:
    return _open.enter_context(Anthropic(api_key="none", base_url=server.url))


def test_an_answer_can_be_sent_back(server: Running) -> None:
    """As both clients' guides do it for the next turn."""
    openai = openai_at(server)
    ask: list[Any] = [{"role": "user", "content": "Hello."}]
    first = openai.responses.create(model="stories", input=ask, max_output_tokens=8, temperature=0,
                                    include=["message.output_text.logprobs"])  # fmt: skip
    second = openai.responses.create(
        model="stories", input=[*ask, *first.output, *ask], max_output_tokens=8
    )
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    whole = openai.chat.completions.create(
        model="stories", messages=ask, max_tokens=8, temperature=0
    )
    assert whole.choices[0].message.content == first.output_text
    again = openai.chat.completions.create(
        model="stories", messages=[*ask, whole.choices[0].message, *ask], max_tokens=8
    )
    assert again.usage.prompt_tokens == second.usage.input_tokens
    anthropic = anthropic_at(server)
    message = anthropic.messages.create(model="stories", max_tokens=8, messages=ask)
    counted = anthropic.messages.count_tokens(
        model="stories", messages=[*ask, {"role": "assistant", "content": message.content}, *ask]
    )
    assert counted.input_tokens > first.usage.input_tokens + 8


def test_logprobs_of_a_response(server: Running) -> None:
    client = openai_at(server)
    ask = {"model": "stories", "input": "Hello.", "max_output_tokens": 4}
    plain = client.responses.create(**ask)
    assert not plain.output[0].content[0].logprobs
    asked = client.responses.create(**ask, include=["message.output_text.logprobs"])
    assert [len(x.top_logprobs) for x in asked.output[0].content[0].logprobs] == [0] * 4
    top = client.responses.create(**ask, top_logprobs=2)
    assert [len(x.top_logprobs) for x in top.output[0].content[0].logprobs] == [2] * 4


def test_the_tokenizers_configuration(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What evaluations need to write prompts themselves, where it may be told."""
    with server.client() as client:
        refused = client.get("/tokenizer_info")
        config = replace(server.service.config, enable_tokenizer_info_endpoint=True)
        monkeypatch.setattr(server.service, "config", config)
        found = client.get("/tokenizer_info").json()
        monkeypatch.setattr(server.service, "config", replace(config, chat_template="{{ 1 }}"))
        assert client.get("/tokenizer_info").json()["chat_template"] == "{{ 1 }}"
    assert refused.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    tokenizer = server.service.prompts.tokenizer
    assert found["tokenizer_class"]
    assert tokenizer.token_to_id(found["eos_token"]) == tokenizer.eos_token_id
    assert found["chat_template"] == tokenizer.chat_template


def test_tokens_are_counted_also_where_they_dont_fit(server: Running) -> None:
    client = anthropic_at(server)
    many = client.messages.count_tokens(
        model="stories", messages=[{"role": "user", "content": "word " * 2000}]
    )
    assert many.input_tokens > 2000


def test_a_healed_prompt_and_what_follows_are_one_text(server: Running) -> None:
    prompt = "Once upon a ti"
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "token_healing": True}
    with server.client() as client:
        plain = client.post("/v1/completions", json={**body, "logprobs": 0}).json()
        echoed = client.post("/v1/completions", json={**body, "echo": True}).json()
        both = client.post("/v1/completions", json={**body, "echo": True, "logprobs": 0})
        chat = client.post("/v1/chat/completions", json={"messages": CHAT, "token_healing": True})
    (choice,) = plain["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert echoed["choices"][0]["text"] == prompt + choice["text"]
    assert offsets[0] < 0
    assert (prompt + choice["text"])[len(prompt) + offsets[0] :] == "".join(tokens)
    assert plain["usage"]["prompt_tokens"] == len(server.service.prompts.tokenizer.encode(prompt))
    assert plain["usage"]["completion_tokens"] == 4 == len(tokens)
    assert both.status_code == 400
    assert "token_healing" in both.json()["error"]["message"]
    assert chat.json()["error"]["code"] == "unknown_parameter"


def test_logprobs_of_a_completion_in_a_chats_words(server: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
    with server.client() as client:
        found = [
            client.post("/v1/completions", json=body | {"logprobs": asked}).json()["choices"]
            for asked in (True, 1, False, None)
        ]
    assert found[0] == found[1]
    assert found[0][0]["logprobs"] is not None
    assert found[2] == found[3]
    assert found[2][0]["logprobs"] is None


def test_a_prompts_logprobs_with_its_echo(server: Running) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1, "echo": True, "prompt_logprobs": 1}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
        refused = client.post("/v1/completions", json=body | {"logprobs": 1})
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == 5
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_truncation_leaves_a_part_for_the_answer_not_all() -> None:
    """Anthropic's clients ask for thousands of tokens, which are lowered to what fits."""
    said = [{"role": role, "content": "A long walk by the sea. " * (LENGTH // 42)} for role in
            ("user", "assistant", "user", "assistant", "user", "assistant", "user")]  # fmt: skip
    with serving(ServerConfig(truncation="auto")) as running:
        client = anthropic_at(running)
        made = client.messages.create(model="stories", max_tokens=8000, messages=said)
        usage = made.usage
        asked = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert LENGTH // 2 < asked <= LENGTH * 3 // 4
        running.rest()

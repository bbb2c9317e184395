"""`prediction`: OpenAI's own client says what to expect, and hears what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock.server import ServerConfig

from .conftest import Running, serving

ASK: dict[str, Any] = {
    "model": "stories",
    "messages": [{"role": "user", "content": "A cat"}],
    "max_tokens": 60,
    "temperature": 0,
    "extra_body": {"chat_template": "{{ messages[0].content }}"},
}


@pytest.fixture(scope="module")
def expecting() -> Iterator[OpenAI]:
    config = ServerConfig(trust_request_chat_template=True)
    with serving(config, speculative_config={"method": "ngram", "adaptive": False}) as running:
        yield OpenAI(base_url=running.v1, api_key="none", max_retries=0)


def expected(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def test_what_was_expected_is_counted(expecting: OpenAI) -> None:
    plain = expecting.chat.completions.create(**ASK)
    text = plain.choices[0].message.content
    assert text and plain.usage and plain.usage.completion_tokens_details is None
    again = expecting.chat.completions.create(**ASK, **expected(text))
    assert again.choices[0].message.content == text
    assert again.usage and (details := again.usage.completion_tokens_details)
    assert (
        details.accepted_prediction_tokens or 0
    ) > 50 and details.rejected_prediction_tokens == 0
    measured = (again.model_extra or {})["penstock"]
    assert measured["draft_tokens"] == measured["accepted_tokens"]
    assert measured["accepted_tokens"] == details.accepted_prediction_tokens


def test_what_was_guessed_otherwise_isnt_counted(expecting: OpenAI) -> None:
    """By the text's own repetitions; nor what would have come after a stop."""
    again = "One two three. " * 8
    own = ASK | {"messages": [{"role": "user", "content": again}]}
    answer = expecting.chat.completions.create(**own, **expected("\u00a7"))
    assert answer.usage and (details := answer.usage.completion_tokens_details)
    assert not details.accepted_prediction_tokens and not details.rejected_prediction_tokens
    text = expecting.chat.completions.create(**ASK).choices[0].message.content or ""
    stop = text.split()[8]
    answer = expecting.chat.completions.create(**ASK, **expected(text), stop=[stop])
    assert answer.usage and (details := answer.usage.completion_tokens_details)
    assert 0 < (details.accepted_prediction_tokens or 0) <= answer.usage.completion_tokens


def test_parts_and_a_stream(expecting: OpenAI) -> None:
    text = expecting.chat.completions.create(**ASK).choices[0].message.content or ""
    parts = [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:] + "no more"}]
    stream = expecting.chat.completions.create(
        **ASK, **expected(parts), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(x.choices[0].delta.content or "" for x in chunks) == text
    assert last.usage and (details := last.usage.completion_tokens_details)
    assert (details.accepted_prediction_tokens or 0) > 50


def test_nothing_of_it_comes(expecting: OpenAI) -> None:
    text = expecting.chat.completions.create(**ASK).choices[0].message.content
    other = "1 2 3 4 5 6 7 8 9 " * 20
    answer = expecting.chat.completions.create(**ASK, **expected(other))
    assert answer.choices[0].message.content == text


@pytest.mark.parametrize(
    ("given", "words", "param"),
    [
        ("text", "prediction", "prediction"),
        ({"type": "file", "content": "a"}, "prediction.type", "prediction.type"),
        ({"type": "content"}, "prediction.content", "prediction.content"),
        ({"type": "content", "content": ""}, "has no text", "prediction"),
        ({"type": "content", "content": []}, "prediction", "prediction"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "Only text", None),
        ({"type": "content", "content": "a" * 1_000_000}, "has 1,000,000 characters", "prediction"),
    ],
    ids=["text", "type", "nothing", "empty", "no parts", "picture", "huge"],
)  # fmt: skip
def test_what_cant_be_expected(expecting: OpenAI, given: Any, words: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        expecting.chat.completions.create(**ASK, prediction=given)
    body: Any = refused.value.body
    assert param is None or body["param"].startswith(param)


def test_a_server_that_guesses_nothing(server: Running) -> None:
    client = OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no effect: there are no drafts") as refused:
        client.chat.completions.create(
            model="stories", messages=ASK["messages"], **expected("A cat sat.")
        )
    body: Any = refused.value.body
    assert body["param"] == "prediction" and "speculative_config" in body["message"]

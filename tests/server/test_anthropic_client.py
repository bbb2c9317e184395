"""The official `anthropic` client, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from anthropic import Anthropic

from tests.server.conftest import Running

ASK = [{"role": "user", "content": "Tell me about a little dog."}]

GREEDY = {"temperature": 0.0}  # which newer clients have no argument for


@pytest.fixture
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_and_its_stream(client: Anthropic) -> None:
    options = {"model": "stories", "max_tokens": 5, "messages": ASK, "extra_body": GREEDY}
    whole = client.messages.create(**options, system="Be kind.")
    assert whole.role == "assistant"
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 5
    with client.messages.stream(**options, system="Be kind.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 5


def test_counts_are_those_of_the_prompt(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="stories", messages=ASK, system="Be kind.")
    made = client.messages.create(model="stories", max_tokens=1, messages=ASK, system="Be kind.")
    usage = made.usage
    parts = (
        usage.input_tokens,
        usage.cache_read_input_tokens or 0,
        usage.cache_creation_input_tokens or 0,
    )
    assert counted.input_tokens == sum(parts)


def test_stop_sequences(client: Anthropic) -> None:
    free = client.messages.create(model="stories", max_tokens=60, messages=ASK, extra_body=GREEDY)
    text = free.content[0].text
    word = text.split()[4]
    cut = client.messages.create(
        model="stories", max_tokens=60, messages=ASK, extra_body=GREEDY, stop_sequences=[word]
    )
    assert cut.stop_reason == "stop_sequence"
    assert cut.stop_sequence == word
    assert cut.content[0].text == text[: text.index(word)]


def test_a_system_prompt_is_kept(client: Anthropic, server: Running) -> None:
    system = [
        {
            "type": "text",
            "text": "You tell short tales about animals who live beside the sea. " * 5,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ]
    server.service.llm.engine.reset_prefix_cache()
    first = client.messages.create(model="stories", max_tokens=2, messages=ASK, system=system)
    assert first.usage.cache_creation_input_tokens
    assert server.llm.stats()["pinned_blocks"] > 0
    again = client.messages.create(model="stories", max_tokens=2, messages=ASK, system=system)
    assert again.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens // 32 * 32
    server.service.llm.engine.reset_prefix_cache()


def test_ids_of_requests(client: Anthropic) -> None:
    made = client.messages.create(model="stories", max_tokens=1, messages=ASK)
    assert made._request_id and made._request_id in made.id
    counted = client.messages.count_tokens(model="stories", messages=ASK)
    assert counted._request_id
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(model="claude-none", max_tokens=2, messages=ASK)
    assert error.value.request_id == error.value.body["request_id"]


def test_errors_are_the_clients_own(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-none", max_tokens=2, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="stories", max_tokens=0, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        client.messages.create(model="stories", max_tokens=2, messages=ASK, container="c")

"""The official `openai` client, unchanged."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.conftest import Running

STORY = "Once upon a time"
ASK = [{"role": "user", "content": "Tell me about a little dog."}]


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "stories"
    assert client.models.retrieve("stories").id == "stories"


def test_a_completion_is_the_engines(client: OpenAI, server: Running) -> None:
    answer = client.completions.create(model="stories", prompt=STORY, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    tokens = server.service.prompts.of_text(STORY).tokens
    assert answer.usage.prompt_tokens == len(tokens)

    async def direct() -> str:
        params = server.service.defaults.__class__(temperature=0.0, max_tokens=12)
        text = ""
        async for output in server.llm.generate(STORY, params):
            text = output.outputs[0].text
        return text

    assert choice.text == asyncio.run(direct())


def test_chat_streams_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="stories", messages=ASK, max_completion_tokens=40, seed=7
    )
    pieces, usage, roles, reasons = [], None, [], []
    for chunk in client.chat.completions.create(
        model="stories",
        messages=ASK,
        max_completion_tokens=40,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            roles.append(choice.delta.role)
            reasons.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert roles[0] == "assistant"
    assert reasons[-1] == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_usage_in_each_chunk(client: OpenAI) -> None:
    """As vLLM has it, of a role that has no text yet, too."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    for chunk in client.chat.completions.create(
        model="stories", messages=ASK, max_completion_tokens=6, stream=True, stream_options=options
    ):
        assert chunk.usage is not None
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        counts.append(chunk.usage.completion_tokens)
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] <= 6


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="stories", messages=ASK, max_completion_tokens=6, logprobs=True, top_logprobs=3,
        temperature=0,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for position in logprobs.content:
        assert len(position.top_logprobs) == 3
        best = [top.logprob for top in position.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert position.logprob == best[0]  # greedy
        assert position.bytes is not None
    text = b"".join(bytes(p.bytes or []) for p in logprobs.content).decode()
    assert text == answer.choices[0].message.content


def test_streamed_logprobs_are_those_of_the_whole(client: OpenAI) -> None:
    options = {
        "model": "stories", "messages": ASK, "max_completion_tokens": 8, "logprobs": True,
        "top_logprobs": 2, "seed": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    found = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                found += choice.logprobs.content or []
    assert found == whole.choices[0].logprobs.content


def test_four_samples(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="stories", messages=ASK, n=4, max_completion_tokens=12, seed=1, temperature=1.2
    )
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    streamed = ["", "", "", ""]
    for chunk in client.chat.completions.create(
        model="stories", messages=ASK, n=4, max_completion_tokens=12, seed=1, temperature=1.2,
        stream=True,
    ):  # fmt: skip
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_several_prompts(client: OpenAI) -> None:
    prompts = [STORY, "The little dog", "In the garden"]
    together = client.completions.create(
        model="stories", prompt=prompts, max_tokens=10, temperature=0
    )
    alone = [
        client.completions.create(model="stories", prompt=p, max_tokens=10, temperature=0)
        for p in prompts
    ]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    streamed = ["", "", ""]
    for chunk in client.completions.create(
        model="stories", prompt=prompts, max_tokens=10, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [c.text for c in together.choices]


def test_stop(client: OpenAI) -> None:
    free = client.completions.create(model="stories", prompt=STORY, max_tokens=60, temperature=0)
    text = free.choices[0].text
    word = text.split()[6]
    cut = client.completions.create(
        model="stories", prompt=STORY, max_tokens=60, temperature=0, stop=[word, "never there"]
    )
    assert cut.choices[0].text == text[: text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = ""
    for chunk in client.completions.create(
        model="stories", prompt=STORY, max_tokens=60, temperature=0, stop=word, stream=True
    ):
        streamed += "".join(choice.text for choice in chunk.choices)
    assert streamed == cut.choices[0].text


def test_cached_tokens(client: OpenAI) -> None:
    prompt = "A tale of three friends who lived beside the sea. " * 8
    fresh = {"extra_body": {"cache_salt": "test_cached_tokens"}}
    first = client.completions.create(model="stories", prompt=prompt, max_tokens=2, **fresh)
    again = client.completions.create(model="stories", prompt=prompt, max_tokens=2, **fresh)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    size = 32
    assert (
        again.usage.prompt_tokens_details.cached_tokens
        == (again.usage.prompt_tokens - 1) // size * size
    )


def test_logit_bias_and_vllms_fields(client: OpenAI, server: Running) -> None:
    tokenizer = server.service.prompts.tokenizer
    (dog,) = tokenizer.encode(" dog", add_special_tokens=False)
    forced = client.completions.create(
        model="stories", prompt=STORY, max_tokens=3, extra_body={"allowed_token_ids": [dog]}
    )
    assert forced.choices[0].text == " dog dog dog"
    biased = client.completions.create(
        model="stories", prompt=STORY, max_tokens=1, logit_bias={str(dog): 100}
    )
    assert biased.choices[0].text == " dog"
    options = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 4,
               "ignore_eos": True, "stop_token_ids": [dog], "prompt_logprobs": 1,
               "return_token_ids": True}  # fmt: skip
    answer = client.completions.create(
        model="stories", prompt=STORY, max_tokens=5, seed=-3, extra_body=options
    )
    choice = answer.choices[0].model_dump()
    assert len(choice["token_ids"]) <= 5
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


def test_echo_gives_the_prompts_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="stories", prompt=STORY, max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == STORY
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(x < 0 for x in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(
        model="stories", input="Tell me about a cat.", instructions="Be brief.",
        max_output_tokens=5, temperature=0,
    )  # fmt: skip
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 5
    text, kinds = "", []
    with client.responses.stream(
        model="stories", input="Tell me about a cat.", instructions="Be brief.",
        max_output_tokens=5, temperature=0,
    ) as stream:  # fmt: skip
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == answer.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_embeddings(client: OpenAI) -> None:
    texts = ["a dog", "the sea is blue"]
    answer = client.embeddings.create(model="stories", input=texts)  # base64 on the wire
    assert [item.index for item in answer.data] == [0, 1]
    for item in answer.data:
        assert sum(x * x for x in item.embedding) == pytest.approx(1.0, abs=1e-4)
    plain = client.embeddings.create(model="stories", input=texts, encoding_format="float")
    assert [item.embedding for item in plain.data] == [
        pytest.approx(item.embedding, abs=1e-7) for item in answer.data
    ]
    raw = client.embeddings.with_raw_response.create(model="stories", input=texts[0],
                                                     encoding_format="base64")  # fmt: skip
    data = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == answer.data[0].embedding
    short = client.embeddings.create(model="stories", input=texts[0], dimensions=16)
    assert len(short.data[0].embedding) == 16


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"isn't served here\. There is: stories\."):
        client.completions.create(model="gpt-none", prompt=STORY)
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="stories", prompt=STORY, temperature=-1)
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="audio") as unsupported:
        client.chat.completions.create(
            model="stories", messages=ASK, audio={"voice": "alloy", "format": "wav"}
        )
    assert unsupported.value.param == "audio"
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as long:
        client.completions.create(model="stories", prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"


def test_leaving_a_stream_frees_its_blocks(server: Running) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="stories", prompt=STORY, max_tokens=400, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    assert server.rest()["used_blocks"] == 0

"""Conversations that are summarised, through the official client and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from penstock.errors import ConfigError
from penstock.server import ServerConfig
from penstock.server.keys import Key, Limits
from penstock.server.protocol.compaction import unsealed
from tests.server.conftest import Running, serving
from tests.server.test_retention import SAID, TURNS, conversation

THRESHOLD = 700
ASK = "Summarize our conversation so far."
SYSTEM: Any = {"role": "system", "content": "You tell stories of dogs."}


def at(threshold: int | None = THRESHOLD) -> list[Any]:
    return [{"type": "compaction", "compact_threshold": threshold}]


@pytest.fixture(scope="module")
def chats() -> Iterator[Running]:
    with serving(ServerConfig(log_prompts=True), model="stories-chat") as running:
        yield running


@pytest.fixture
def client(chats: Running) -> Iterator[OpenAI]:
    chats.service.remembered.__init__()  # type: ignore[misc]
    with OpenAI(base_url=chats.v1, api_key="none", max_retries=0) as made:
        yield made
    assert chats.rest()["used_blocks"] == 0


def user(turn: int) -> dict[str, str]:
    return {"role": "user", "content": f"{turn}: {SAID * (1 + turn % 3)}"}


def spent(answer: Any) -> dict[str, int] | None:
    return answer.model_extra["penstock"].get("compaction")


def prompts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.fields["prompt"] for x in caplog.records if "prompt" in getattr(x, "fields", {})]


@pytest.mark.parametrize("drops", [False, True], ids=["all items", "from the last compaction on"])
def test_fifty_turns_stay_within_limits(
    client: OpenAI, drops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With the item sent back; what was said before it needn't be."""
    caplog.set_level("INFO", "penstock.server")
    items: list[Any] = [SYSTEM]
    compactions = 0
    for turn in range(TURNS):
        items.append(user(turn))
        caplog.clear()
        answer = client.responses.create(
            model="stories", input=items, max_output_tokens=40, temperature=0,
            context_management=at(),
        )  # fmt: skip
        cost = spent(answer)
        *asked, own = prompts(caplog)
        assert len(asked) == (cost or {"passes": 0})["passes"]
        assert own.count("stories of dogs") == 1 and f"{turn}: " in own
        kinds = [item.type for item in answer.output]
        assert kinds == (["compaction", "message"] if cost else ["message"])
        given = (cost or {"input_tokens": 0})["input_tokens"]
        assert answer.usage.input_tokens - given <= THRESHOLD
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        if cost is not None:
            compactions += 1
            assert cost["passes"] == 1 and 0 < cost["output_tokens"] <= THRESHOLD // 8
            assert cost["cached_tokens"] > 0.7 * cost["input_tokens"]  # the turns before are there
            assert answer.usage.output_tokens >= cost["output_tokens"]
            summary = unsealed(answer.output[0].encrypted_content, "").summary
            assert summary and f"{ASK}<|im_end|>\n<|im_start|>assistant\n{summary}" in own
            assert "Summarize our conversation so far, so that" in asked[0]
        elif compactions:
            assert ASK in own
        items += [item.model_dump() for item in answer.output]
        if drops and cost is not None:
            items = [item.model_dump() for item in answer.output]
    assert compactions > 5


def test_streamed_as_whole(client: OpenAI, chats: Running) -> None:
    items: Any = conversation(12)
    options: dict[str, Any] = {
        "model": "stories", "input": items, "max_output_tokens": 30, "temperature": 0,
        "context_management": at(),
    }  # fmt: skip
    whole = client.responses.create(**options)
    chats.service.remembered.__init__()  # type: ignore[misc]
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.output_item.done",
    ]  # fmt: skip
    item, final = events[3].item, events[-1].response
    assert item.type == "compaction"
    assert item.encrypted_content == whole.output[0].encrypted_content
    assert events[4].output_index == 1
    assert [x.type for x in final.output] == ["compaction", "message"]
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert spent(final) is not None and spent(final)["passes"] == 1


def test_chats_too(client: OpenAI, chats: Running) -> None:
    """They send all messages each time: what was summarised is found again, here or elsewhere."""
    made, computed = [], 0
    for turn in range(TURNS):
        answer = client.chat.completions.create(
            model="stories", messages=conversation(turn), max_tokens=40, temperature=0,  # type: ignore[arg-type]
            extra_body={"context_management": at()},
        )  # fmt: skip
        cost, usage = spent(answer), answer.usage
        given = (cost or {"input_tokens": 0})["input_tokens"]
        assert usage.prompt_tokens - given <= THRESHOLD
        computed += usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        made.append((cost or {"messages": 0})["messages"])
        new = turn > 0 and made[-1] != made[-2]
        assert (cost is not None and cost["passes"] == 1) == new
    assert made == sorted(made) and made[-1] > 60
    assert computed < 9000  # truncation: "auto" computes 33,000
    chats.service.remembered.__init__()  # type: ignore[misc]
    again = client.chat.completions.create(
        model="stories", messages=conversation(TURNS - 1), max_tokens=40, temperature=0,  # type: ignore[arg-type]
        extra_body={"context_management": at()},
    )  # fmt: skip
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert spent(again)["passes"] == len(set(made)) - 1
    assert again.usage.completion_tokens > answer.usage.completion_tokens


def test_a_chats_stream_and_header(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "stories", "messages": conversation(12), "max_tokens": 20, "temperature": 0,
        "extra_body": {"context_management": at()}, "n": 1,
    }  # fmt: skip
    raw = client.chat.completions.with_raw_response.create(**options)
    whole = raw.parse()
    assert int(raw.headers["x-penstock-compacted-messages"]) == spent(whole)["messages"] > 0
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert spent(chunks[-1])["messages"] == spent(whole)["messages"]
    less = whole.usage.prompt_tokens - spent(whole)["input_tokens"]
    assert chunks[-1].usage.prompt_tokens == less  # the summary was remembered


def test_compact(client: OpenAI) -> None:
    """Asked for, whatever the prompt's length; the item goes on as the conversation would."""
    talk: Any = conversation(3)
    made = client.responses.compact(model="stories", input=talk)
    assert made.object == "response.compaction"
    *kept, item = made.output
    assert [x.type for x in kept] == ["message"] and item.type == "compaction"
    assert kept[0].content[0].text == talk[-1]["content"]
    assert made.usage.output_tokens > 0 and made.usage.input_tokens > 100
    opened = unsealed(item.encrypted_content, "")
    assert [m.role for m in opened.messages] == ["system", "user"]
    after = client.responses.create(
        model="stories", input=[*(x.model_dump(warnings=False) for x in made.output), user(9)],
        max_output_tokens=10, temperature=0,
    )  # fmt: skip
    alone = client.responses.create(
        model="stories", input=[item.model_dump(), user(9)], max_output_tokens=10, temperature=0
    )
    assert after.output_text == alone.output_text
    assert after.usage.input_tokens == alone.usage.input_tokens
    # Instructions are the request's own, system messages of the input the later ones.
    other = client.responses.compact(model="stories", input=talk, instructions="Be brief.")
    roles = [m.role for m in unsealed(other.output[-1].encrypted_content, "").messages]
    assert roles == ["system", "user"]
    with pytest.raises(openai.BadRequestError, match="nothing to summarise"):
        client.responses.compact(model="stories", input="Once")
    with pytest.raises(openai.NotFoundError):
        client.responses.compact(model="another", input=talk)


def test_the_systems_messages_are_those_that_are_sent(
    client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.server")
    item = client.responses.compact(model="stories", input=conversation(3)).output[-1].model_dump()  # type: ignore[arg-type]
    mine: Any = {"role": "developer", "content": "You tell stories of cats."}
    for items, words in (([item, user(1)], "of dogs"), ([mine, item, user(1)], "of cats")):
        caplog.clear()
        client.responses.create(model="stories", input=items, max_output_tokens=2)
        (prompt,) = prompts(caplog)
        assert words in prompt
        assert ("of dogs" in prompt) + ("of cats" in prompt) == 1


def test_broken_items(client: OpenAI) -> None:
    talk: Any = conversation(3)
    item = client.responses.compact(model="stories", input=talk).output[-1].model_dump()
    good = item["encrypted_content"]
    foreign = "gAAAAABpM0Yj" + "A" * 200
    for wrong in (
        foreign, "", good[:-4], good[:60] + ("A" if good[60] != "A" else "B") + good[61:],
        good + "AAAA", "penstock1.", "penstock1.####", "penstock1.AAAA",
    ):  # fmt: skip
        items: Any = [SYSTEM, {**item, "encrypted_content": wrong}, user(1)]
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="stories", input=items, max_output_tokens=2)
        assert refused.value.code == "invalid_compaction_item"
        assert refused.value.param == "input[1].encrypted_content"
        assert f"({len(wrong):,} characters)" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="has no encrypted_content"):
        client.responses.create(model="stories", input=[{"type": "compaction"}])  # type: ignore[list-item]
    thought: Any = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].encrypted_content' isn't su"):
        client.responses.create(model="stories", input=[thought, user(1)])  # type: ignore[list-item]


WRONG: list[tuple[Any, str, str]] = [
    ([{"type": "compaction", "compact_threshold": "700"}], "[0].compact_threshold", "an integer"),
    ([{"type": "compaction", "compact_threshold": 7.5}], "[0].compact_threshold", "an integer"),
    ([{"type": "compaction", "compact_threshold": 127}], "[0].compact_threshold", "at least 128"),
    ([{"type": "compaction", "compact_threshold": -1}], "[0].compact_threshold", "at least 128"),
    ([{"type": "clear"}], "[0].type", "'compaction'"),
    ([{"compact_threshold": 700}], "[0].type", "missing"),
    ([{"type": "compaction", "more": 1}], "[0].more", "isn't a field"),
    (at() * 2, "", "at most 1"),
    ("compaction", "", "must be a list"),
    (at()[0], "", "must be a list"),
]


@pytest.mark.parametrize(("value", "place", "words"), WRONG)
def test_wrong_wishes(chats: Running, value: Any, place: str, words: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    with chats.client() as client:
        for path, body in bodies.items():
            answer = client.post(path, json={**body, "context_management": value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, f"context_management{place}")
            assert words in error["message"]


def test_thresholds_that_cant_be_kept(client: OpenAI) -> None:
    rules: Any = {"role": "system", "content": SAID * 12}
    with pytest.raises(openai.BadRequestError) as small:
        client.responses.create(
            model="stories", input=[rules, *conversation(2)[1:]], max_output_tokens=10,  # type: ignore[list-item]
            context_management=at(128),
        )  # fmt: skip
    assert small.value.code == "compaction_impossible"
    assert small.value.param == "context_management[0].compact_threshold"
    assert "compact_threshold is 128 tokens, but the system's messages" in small.value.message
    # With truncation beside it, what can't be summarised is left out where need be.
    made = client.responses.create(
        model="stories", input=[rules, *conversation(2)[1:]], max_output_tokens=10,  # type: ignore[list-item]
        context_management=at(128), truncation="auto",
    )  # fmt: skip
    assert spent(made) is None
    long: Any = [user(0), {"role": "assistant", "content": SAID * 60}, user(1)]
    with pytest.raises(openai.BadRequestError, match="can't be parted") as parted:
        client.responses.create(model="stories", input=long, context_management=at())
    assert "the model takes 1,024" in parted.value.message
    made = client.responses.create(
        model="stories", input=long, context_management=at(), truncation="auto",
        max_output_tokens=10,
    )  # fmt: skip
    assert made.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 5e9}, "temperature"),
        ({"max_tokens": 2000}, "tokens is 2,000, but"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, ""),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_computed(
    client: OpenAI, chats: Running, wrong: dict[str, Any], param: str
) -> None:
    made = chats.llm.stats()["generation_tokens"]
    body = {"messages": conversation(12), "max_tokens": 10, "context_management": at(), **wrong}
    with chats.client() as http:
        answers = [http.post("/v1/chat/completions", json=body)]
        if param:
            names = {"max_tokens": "max_output_tokens"}
            fields = {names.get(k, k): v for k, v in {"max_tokens": 10, **wrong}.items()}
            body = {"input": conversation(12), "context_management": at(), **fields}
            answers.append(http.post("/v1/responses", json=body))
        if param == "temperature":
            edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 700}}
            body = {
                "model": "stories", "messages": conversation(12)[1:], "max_tokens": 10,
                "context_management": {"edits": [edit]}, **wrong,
            }  # fmt: skip
            answers.append(http.post("/v1/messages", json=body))
    for answer in answers:
        assert answer.status_code == 400 and param in answer.text, answer.text
    assert chats.rest()["generation_tokens"] == made


def test_a_last_turn_that_is_too_long(client: OpenAI) -> None:
    """It can't be summed up, and the error says so."""
    long: Any = [
        user(0),
        {"role": "assistant", "content": "Yes."},
        {**user(1), "content": SAID * 60},
    ]
    for talk in (long, long[-1:]):
        with pytest.raises(openai.BadRequestError) as told:
            client.responses.create(model="stories", input=talk, context_management=at())
        assert told.value.code == "context_length_exceeded"
        assert "the last one stays as it is: shorten that, or send truncation" in told.value.message
    with pytest.raises(openai.BadRequestError, match="Shorten it, or send truncation"):
        client.responses.create(model="stories", input=long)


def test_an_empty_summary(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error; where turns are left out instead, it has cost what it has cost."""
    talk: Any = conversation(12)
    plain = client.responses.create(
        model="stories", input=talk, max_output_tokens=10, truncation="auto"
    )
    said = ({"role": "assistant", "content": "  "}, None)
    monkeypatch.setattr("penstock.server.routes.compaction.message_of", lambda *_: said)
    with pytest.raises(openai.BadRequestError, match=r"has said nothing in \d+ of 8") as error:
        client.responses.create(model="stories", input=talk, context_management=at())
    assert error.value.code == "compaction_impossible"
    made = client.responses.create(
        model="stories", input=talk, max_output_tokens=10, context_management=at(),
        truncation="auto",
    )  # fmt: skip
    assert [item.type for item in made.output] == ["message"]
    cost = spent(made)
    assert cost is not None and (cost["messages"], cost["passes"]) == (0, 1)
    assert made.usage.input_tokens == plain.usage.input_tokens + cost["input_tokens"]
    assert made.usage.output_tokens == plain.usage.output_tokens + cost["output_tokens"] > 10


@pytest.mark.parametrize("threshold", [None, 10**6, 2**70])
def test_thresholds_beyond_the_model(client: OpenAI, threshold: int | None) -> None:
    """The prompt and its answer fit then, which they wouldn't without a summary."""
    talk: Any = conversation(14)
    with pytest.raises(openai.BadRequestError, match="only"):
        client.responses.create(model="stories", input=talk, max_output_tokens=40)
    made = client.responses.create(
        model="stories", input=talk, max_output_tokens=40, context_management=at(threshold)
    )
    assert spent(made)["messages"] > 0
    alone = made.usage.input_tokens - spent(made)["input_tokens"]
    assert alone + 40 <= 1024


def test_the_end_of_a_prompt_isnt_summarised(chats: Running) -> None:
    body = {"messages": conversation(2), "context_management": at(), "truncate_prompt_tokens": 9}
    with chats.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "context_management"


def test_requests_at_once(client: OpenAI, chats: Running) -> None:
    """Conversations of several callers, each with its own summaries, as alone."""

    def ask(number: int) -> tuple[str, Any]:
        talk: Any = [{"role": "system", "content": f"You are number {number}."}]
        talk += conversation(10 + number % 3)[1:]
        answer = client.chat.completions.create(
            model="stories", messages=talk, max_tokens=16, temperature=0,
            extra_body={"context_management": at(), "cache_salt": f"salt {number}"},
        )  # fmt: skip
        assert answer.usage.prompt_tokens - spent(answer)["input_tokens"] <= THRESHOLD
        return answer.choices[0].message.content or "", spent(answer)["messages"]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    chats.service.remembered.__init__()  # type: ignore[misc]
    assert [ask(number) for number in range(8)] == together


def test_tools(client: OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    """Calls stay with what came of them; the summary's prompt has no tools to call."""
    caplog.set_level("INFO", "penstock.server")
    tools: Any = [{"type": "function", "name": "weather", "description": "Tells the weather.",
                   "parameters": {"type": "object"}}]  # fmt: skip
    items: list[Any] = [SYSTEM, user(0)]
    for step in range(9):
        call = {"call_id": f"c{step}", "name": "weather", "arguments": '{"at": "sea"}'}
        items.append({"type": "function_call", **call})
        items.append({"type": "function_call_output", "call_id": f"c{step}", "output": SAID})
        items += [] if step % 3 else [{"role": "assistant", "content": "Sunny."}, user(step)]
    answer = client.responses.create(
        model="stories", input=items, tools=tools, max_output_tokens=20, temperature=0,
        context_management=at(600),
    )  # fmt: skip
    assert answer.output[0].type == "compaction"
    asked, own = prompts(caplog)[0], prompts(caplog)[-1]
    assert "Tells the weather" in own and "Tells the weather" not in asked
    assert "tool_call" in asked  # what was called is told
    kept = unsealed(answer.output[0].encrypted_content, "").others
    open_calls = {call.id for message in kept for call in message.tool_calls or ()}
    assert {m.tool_call_id for m in kept if m.role == "tool"} == open_calls != set()
    again = client.responses.create(
        model="stories", input=[answer.output[0].model_dump(), *items[-1:]], tools=tools,  # type: ignore[list-item]
        max_output_tokens=20, temperature=0,
    )  # fmt: skip
    assert again.output


def test_the_servers_setting() -> None:
    """Of all conversations, where a request says nothing else; and what keys pay."""
    key = Key.of("secret-of-all", "all", Limits(tokens_per_minute=10_000))
    config = ServerConfig(compaction_threshold=THRESHOLD, keys=(key,))
    talk: Any = conversation(12)
    with (
        serving(config, model="stories-chat") as running,
        OpenAI(base_url=running.v1, api_key="secret-of-all", max_retries=0) as client,
        Anthropic(base_url=running.url, api_key="secret-of-all", max_retries=0) as other,
    ):
        account: Any = running.service.gate._accounts["all"]
        settle, used = account.settle, []
        account.settle = lambda tokens, samples=1: (used.append(tokens), settle(tokens, samples))
        off = {"context_management": []}
        with pytest.raises(openai.BadRequestError, match="has 1,"):
            client.chat.completions.create(model="stories", messages=talk * 2, extra_body=off)
        chat = client.chat.completions.create(model="stories", messages=talk, max_tokens=10)
        assert spent(chat)["passes"] == 1
        response = client.responses.create(model="stories", input=talk, max_output_tokens=10)
        assert spent(response)["messages"] == spent(chat)["messages"]
        assert response.output[0].type == "compaction"
        assert spent(response)["passes"] == 0  # it was written for the chat
        message = other.messages.create(
            model="stories", system=talk[0]["content"], messages=talk[1:], max_tokens=10
        )
        assert spent(message)["messages"] > 0
        running.rest()
        assert message.content[0].type == "text"  # a block is for who asks for one
        assert spent(message)["passes"] == 0
        usage = message.usage
        paid = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
        assert sum(used) == paid + chat.usage.total_tokens + response.usage.total_tokens
        assert account.running == 0
    with (
        serving(ServerConfig(truncation="auto"), model="stories-chat") as running,
        OpenAI(base_url=running.v1, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="nothing to summarise"),
    ):
        client.responses.compact(model="stories", input="Once")
    for wrong in (0, 127, -5):
        with pytest.raises(ConfigError, match=f"compaction_threshold is {wrong}; it must be at le"):
            ServerConfig(compaction_threshold=wrong)


def test_leaving_ends_the_summary(chats: Running) -> None:
    """Whoever goes while it is written holds nothing any more."""
    import socket

    chats.service.remembered.__init__()  # type: ignore[misc]
    body = {"messages": conversation(12), "context_management": at(), "max_tokens": 40}
    text = json.dumps(body).encode()
    host, port = chats.url.removeprefix("http://").split(":")
    done = chats.service.done
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)
        )
        while not chats.llm.stats()["requests"]:
            pass
    assert chats.rest()["used_blocks"] == 0
    assert not chats.service.inflight
    assert chats.service.done <= done + 1  # the summary; nobody waited for the answer


def test_a_line_of_the_log_for_each_summary(
    client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.server")
    client.responses.create(
        model="stories", input=conversation(12), max_output_tokens=5, context_management=at()  # type: ignore[arg-type]
    )  # fmt: skip
    names = [x.fields["request_id"] for x in caplog.records if x.getMessage() == "request"]
    assert len(names) == 2
    assert names[0] == f"{names[1]}-summary-1"

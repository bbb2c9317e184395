"""Conversations that are summed up, through Anthropic's client and its beta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from penstock.server import ServerConfig
from penstock.server.protocol.compaction import unsealed
from tests.server.conftest import Running, serving
from tests.server.test_retention import TURNS, conversation

THRESHOLD = 700
BETA = ["compact-2026-01-12"]
SYSTEM = "You tell stories of dogs."


def edits(threshold: int | None = THRESHOLD, **more: Any) -> Any:
    trigger = {} if threshold is None else {"trigger": {"type": "input_tokens", "value": threshold}}
    return {"edits": [{"type": "compact_20260112", **trigger, **more}]}


@pytest.fixture(scope="module")
def chats() -> Iterator[Running]:
    with serving(ServerConfig(log_prompts=True), model="stories-chat") as running:
        yield running


@pytest.fixture
def client(chats: Running) -> Iterator[Anthropic]:
    chats.service.remembered.__init__()  # type: ignore[misc]
    with Anthropic(base_url=chats.url, api_key="none", max_retries=0) as made:
        yield made
    assert chats.rest()["used_blocks"] == 0


def ask(client: Anthropic, messages: list[Any], **more: Any) -> Any:
    options: dict[str, Any] = {
        "model": "stories", "system": SYSTEM, "max_tokens": 40, "betas": BETA,
        "context_management": edits(), "extra_body": {"temperature": 0}, **more,
    }  # fmt: skip
    return client.beta.messages.create(messages=messages, **options)


def prompts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.fields["prompt"] for x in caplog.records if "prompt" in getattr(x, "fields", {})]


def test_fifty_turns_stay_within_limits(
    client: Anthropic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.server")
    messages: list[Any] = []
    compactions = 0
    for turn in range(TURNS):
        messages.append(conversation(turn)[-1])
        caplog.clear()
        answer = ask(client, messages)
        usage, own = answer.usage, prompts(caplog)[-1]
        assert usage.input_tokens + usage.cache_read_input_tokens <= THRESHOLD
        assert own.count(SYSTEM) == 1 and f"{turn}: " in own
        kinds = [block.type for block in answer.content]
        if "compaction" in kinds:
            compactions += 1
            assert kinds == ["compaction", "text"]
            assert answer.content[0].content in own
            summary, said = usage.iterations
            assert (summary.type, said.type) == ("compaction", "message")
            assert 0 < summary.output_tokens <= THRESHOLD // 8
            assert summary.cache_read_input_tokens > 4 * summary.input_tokens
            assert said.output_tokens == usage.output_tokens
        else:
            assert kinds == ["text"] and usage.iterations is None
        messages.append(
            {
                "role": "assistant",
                "content": [b.model_dump(exclude_none=True) for b in answer.content],
            }
        )
    assert compactions > 5


def test_streamed_as_whole(client: Anthropic, chats: Running) -> None:
    messages = conversation(12)[1:]
    whole = ask(client, messages)
    chats.service.remembered.__init__()  # type: ignore[misc]
    with client.beta.messages.stream(
        model="stories", system=SYSTEM, max_tokens=40, betas=BETA, messages=messages,  # type: ignore[arg-type]
        context_management=edits(), extra_body={"temperature": 0},
    ) as stream:  # fmt: skip
        events = list(stream)
        final = stream.get_final_message()
    assert [b.model_dump() for b in final.content] == [b.model_dump() for b in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert any(event.type == "compaction" for event in events)
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_paused(client: Anthropic, chats: Running, streamed: bool) -> None:
    """The summary alone; the next request goes on from it, with or without more."""
    messages: list[Any] = conversation(12)[1:]
    pausing = edits(pause_after_compaction=True)
    made = chats.llm.stats()["generation_tokens"]
    if streamed:
        with client.beta.messages.stream(
            model="stories", system=SYSTEM, max_tokens=40, betas=BETA, messages=messages,
            context_management=pausing,
        ) as stream:  # fmt: skip
            paused = stream.get_final_message()
    else:
        paused = ask(client, messages, context_management=pausing)
    assert paused.stop_reason == "compaction"
    (block,) = paused.content
    assert paused.usage.output_tokens == 0 and paused.usage.iterations[0].output_tokens > 0
    assert chats.rest()["generation_tokens"] - made == paused.usage.iterations[0].output_tokens
    back = {"role": "assistant", "content": [block.model_dump(exclude_none=True)]}
    after = ask(client, [*messages, back], context_management=pausing)
    assert [b.type for b in after.content] == ["text"]
    alone = ask(client, [back], context_management={"edits": []})
    assert alone.content == after.content
    straight = ask(client, messages)  # what it would have been without a pause
    assert straight.content[1:] == after.content
    short = ask(client, messages[:1], context_management=pausing)
    assert short.stop_reason != "compaction"
    known = ask(client, messages, context_management=pausing)  # the summary is remembered
    assert known.stop_reason == "compaction" and known.content == paused.content
    summary, own = known.usage.iterations
    assert (summary.type, summary.input_tokens, summary.output_tokens) == ("compaction", 0, 0)
    assert (own.type, own.output_tokens) == ("message", 0)


def test_own_instructions(client: Anthropic, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.server")
    messages: list[Any] = conversation(12)[1:]
    ask(client, messages, context_management=edits(instructions="Tell what the dog did."))
    assert prompts(caplog)[0].count("Tell what the dog did.") == 1
    caplog.clear()
    ask(client, messages)  # other words, another summary
    assert "Summarize our conversation so far, so that" in prompts(caplog)[0]


def test_what_comes_back(client: Anthropic, caplog: pytest.LogCaptureFixture) -> None:
    """A summary counts as it is sent; one that is null stands for nothing."""
    caplog.set_level("INFO", "penstock.server")
    block = ask(client, conversation(12)[1:]).content[0].model_dump(exclude_none=True)  # type: ignore[arg-type]
    assert unsealed(block["encrypted_content"], "").system == []  # it comes with each request
    mine: Any = {**block, "content": "The dog is called Rex."}
    more: Any = {"role": "user", "content": "And then?"}
    caplog.clear()
    ask(client, [{"role": "assistant", "content": [mine]}, more], max_tokens=2)
    (prompt,) = prompts(caplog)
    assert "called Rex" in prompt and "12: " in prompt and block["content"] not in prompt
    del mine["encrypted_content"]
    caplog.clear()
    ask(client, [{"role": "assistant", "content": [mine]}, more], max_tokens=2)
    (prompt,) = prompts(caplog)
    assert "called Rex" in prompt and "12: " not in prompt
    caplog.clear()
    null: Any = [{"type": "compaction", "content": None}, {"type": "text", "text": "Twice."}]
    first: Any = {"role": "user", "content": "Once."}
    nothing: Any = [first, {"role": "assistant", "content": null}, more]
    ask(client, nothing, max_tokens=2)
    (prompt,) = prompts(caplog)
    assert "Once." in prompt and "Twice." in prompt and "Summarize" not in prompt
    count = client.beta.messages.count_tokens(
        model="stories",
        system=SYSTEM,
        messages=[{"role": "assistant", "content": [mine]}, more],  # type: ignore[list-item]
    )
    assert 0 < count.input_tokens < 100


def test_tokens_are_counted(client: Anthropic) -> None:
    """What compactions stand for is counted, and beside it what was sent; none is made for it."""
    messages: list[Any] = conversation(12)[1:]

    def count(sent: list[Any], **more: Any) -> Any:
        return client.beta.messages.count_tokens(
            model="stories", system=SYSTEM, messages=sent, betas=BETA, **more
        )

    plain = count(messages)
    assert plain.context_management is None
    both = count(messages, context_management=edits())
    assert both.input_tokens == both.context_management.original_input_tokens == plain.input_tokens
    answer = ask(client, messages)
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    assert said[0]["type"] == "compaction"
    more: Any = {"role": "user", "content": "And then?"}
    sent = [*messages, {"role": "assistant", "content": said}, more]
    after = count(sent, context_management=edits())
    assert after.input_tokens == count(sent).input_tokens < plain.input_tokens
    texts = [*messages, {"role": "assistant", "content": said[1:]}, more]
    assert after.context_management.original_input_tokens == count(texts).input_tokens
    alone = count(sent[-2:], context_management={"edits": []})
    assert alone.input_tokens == after.input_tokens
    assert alone.context_management.original_input_tokens == after.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="at least 128"):
        count(messages, context_management=edits(127))


def test_a_turn_that_is_too_long(client: Anthropic) -> None:
    long: Any = {"role": "user", "content": "The dog ran. " * 400}
    with pytest.raises(anthropic.BadRequestError) as alone:
        ask(client, [long])
    assert "Only older turns are summed up, and the last one stays as it is: shorten that" in str(
        alone.value
    )
    with pytest.raises(anthropic.BadRequestError, match="Shorten it, or start the server"):
        ask(client, [long], context_management={"edits": []})


def test_marks_stay_with_the_messages(client: Anthropic) -> None:
    """A client that marks its latest turns has these marks, and none of turns before."""
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    system: Any = [{"type": "text", "text": SYSTEM, **mark}]
    talk: list[Any] = conversation(10)[1:]

    def marked() -> list[Any]:
        """The last two turns of the user's."""
        last = [i for i, x in enumerate(talk) if x["role"] == "user"][-2:]
        return [
            {**x, "content": [{"type": "text", "text": x["content"], **mark}]} if i in last else x
            for i, x in enumerate(talk)
        ]

    compactions = 0
    for turn in range(4):
        answer = ask(client, marked(), system=system)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        for block in blocks:
            if block["type"] == "compaction":
                compactions += 1
                kept = unsealed(block["encrypted_content"], "").messages
                assert len(kept) > 1 and "cache_control" not in str(
                    [message.model_dump(exclude_none=True) for message in kept]
                )
        said = [x for x in blocks if x["type"] != "text" or x["text"]]
        more = {"role": "user", "content": f"{turn}? {'And what did the dog do then? ' * 6}"}
        talk += [{"role": "assistant", "content": said}, more]
    assert compactions > 0


def behind(asked: dict[str, Any]) -> dict[str, Any]:
    """The same edits behind one that has no effect, whatever it says."""
    first = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}
    return {"edits": [first, *asked["edits"]]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"context_management": edits(127)}, "at least 128", "edits[0].trigger.value"),
    ({"context_management": edits("700")}, "must be an integer", "edits[0].trigger.value"),  # type: ignore[arg-type]
    ({"context_management": edits(instructions="")}, "instructions", "edits[0].instructions"),
    ({"context_management": {"edits": edits()["edits"] * 2}}, "is there twice", "edits"),
    ({"context_management": {"edits": [{"type": "clear_all_20300101"}]}},
     "clear_all_20300101", "edits"),
    ({"context_management": edits(tokens=4)}, "isn't a field", "edits[0].tokens"),
    ({"context_management": behind(edits(127))}, "at least 128", "edits[1].trigger.value"),
    ({"context_management": [1]}, "must be an object", "context_management"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words", "place"), WRONG)
def test_wrong_wishes(client: Anthropic, options: Any, words: str, place: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, [{"role": "user", "content": "x"}], **options)
    assert words in str(refused.value) and place in str(refused.value)


def test_the_threshold_is_blamed_where_it_stands(client: Anthropic) -> None:
    talk: Any = [{"role": role, "content": "A walk by the sea. " * 9}
                 for role in ("user", "assistant", "user")]  # fmt: skip
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, talk, system="word " * 150, context_management=behind(edits(128)))
    assert "the system's messages" in str(refused.value)
    assert "edits[1].trigger.value" in str(refused.value)


def test_wrong_blocks(client: Anthropic) -> None:
    for block, role, words in (
        ({"content": ""}, "assistant", "the content of a compaction is a summary, or null"),
        ({"content": "x"}, "user", "A turn of the user has no compaction"),
        ({"content": "x", "encrypted_content": "gAAA"}, "assistant", "isn't that of a compaction"),
        ({"content": "x", "cache_control": {"type": "ephemeral"}}, "assistant", "can't stand on"),
    ):
        wrong: Any = {"role": role, "content": [{"type": "compaction", **block}]}
        with pytest.raises(anthropic.BadRequestError, match=words):
            ask(client, [wrong, {"role": "user", "content": "x"}])
    thought: Any = {"type": "thinking", "thinking": "x", "signature": "", "encrypted_content": "x"}
    with pytest.raises(anthropic.BadRequestError, match="has no encrypted_content"):
        ask(client, [{"role": "assistant", "content": [thought]}, {"role": "user", "content": "x"}])

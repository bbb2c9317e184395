"""Which turns a summary stands for: by a template that counts words, and any summaries."""

from __future__ import annotations

import base64
import hashlib
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from penstock.server.compaction import (
    MOST_PASSES,
    Conversation,
    Play,
    Spent,
    Wanted,
    Writing,
)
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import FunctionCall, Message, ToolCall
from penstock.server.protocol.compaction import sealed, unsealed
from penstock.server.remembered import Remembered


def said(role: Any, words: int, name: str = "") -> Message:
    return Message(role=role, content=" ".join([name or "w"] * words))


def called(number: int) -> Message:
    call = ToolCall(id=f"c{number}", function=FunctionCall(name="f", arguments="{}"))
    return Message(role="assistant", tool_calls=[call])


def answered(number: int, words: int = 5) -> Message:
    return Message(role="tool", content="r " * words, tool_call_id=f"c{number}")


def written(messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Two tokens around each message, and one a word."""
    text = " ".join(f"<{m['role']}> {m['content'] or ''} </>" for m in messages)
    return text, list(range(len(text.split())))


def count(text: str) -> int:
    return len(text.split())


def plain(message: Message) -> dict[str, Any]:
    calls = {"tool_calls": [c.id for c in message.tool_calls]} if message.tool_calls else {}
    return {"role": message.role, "content": message.content or "", **calls}


def play(
    conversation: Conversation,
    threshold: int,
    *,
    max_len: int = 1000,
    reserve: int = 1,
    remembered: Remembered | None = None,
    forced: bool = False,
) -> Play:
    shown = [plain(m) for m in conversation.messages]
    writing = Writing(shown, shown, written, written, count, b"")
    wanted = Wanted(threshold, "field", "compact_threshold", forced)
    return Play(conversation, writing, wanted, remembered or Remembered(), max_len, reserve)


def run(game: Play, summary: Callable[[Any], str] = lambda question: "so it was") -> Conversation:
    while (question := game.next()) is not None:
        assert len(question.tokens) + game.most <= game._max_len
        game.told(summary(question))
    return game.result[0]


def tokens(conversation: Conversation) -> int:
    return len(written([plain(m) for m in conversation.written])[1])


def test_what_fits_stays() -> None:
    talk = Conversation([said("system", 5), said("user", 20), said("assistant", 20)])
    game = play(talk, 200)
    assert run(game) is talk
    assert game.result == (talk, 0)


def test_older_turns_make_way() -> None:
    turns = [said(("user", "assistant")[i % 2], 20, f"t{i}") for i in range(19)]
    talk = Conversation([said("system", 5, "rules"), *turns])
    left = run(play(talk, 200))
    assert left.system == [talk.messages[0]]
    assert left.summary == "so it was"
    assert left.others == turns[-len(left.others) :]
    assert left.others[0].role == "user"
    assert tokens(left) <= 200
    roles = [m.role for m in left.written]
    assert roles == ["system", *(["user", "assistant"] * len(roles))[: len(roles) - 1]]


def test_each_summary_is_of_the_one_before_and_what_came_then() -> None:
    asked = []

    def summary(question: Any) -> str:
        asked.append(question.text)
        return f"summary{len(asked)}"

    turns = [said(("user", "assistant")[i % 2], 20, f"t{i}") for i in range(39)]
    left = run(play(Conversation(turns), 200), summary)
    assert left.summary == f"summary{len(asked)}"
    assert len(asked) > 3
    for number, text in enumerate(asked):
        assert "Summarize our conversation so far, so that" in text
        assert (f"summary{number}" in text) == (number > 0)
    seen = [name for i in range(39) for name in [f"t{i}"] if sum(name in x.split() for x in asked)]
    assert [f"t{i}" for i in range(len(seen))] == seen  # nothing is passed over


@pytest.mark.parametrize("seed", range(30))
def test_any_conversation(seed: int) -> None:
    """Grows turn by turn: each request fits, has what must stay, and calls with their results."""
    chance = random.Random(seed)
    remembered, threshold = Remembered(), chance.choice([150, 200, 400])
    messages, number = [said("system", chance.randrange(1, 10))], 0
    before: tuple[str | None, int] = (None, 0)
    passes = 0

    def full(question: Any) -> str:  # as long as it may be
        return f"sum{len(question.tokens)} " + "x " * (threshold // 8 - 1)

    for _ in range(40):
        if chance.random() < 0.1:
            messages.append(said("system", 2, "more"))
        messages.append(said("user", chance.randrange(1, 20), "u"))
        for _ in range(chance.choice([0, 0, 0, 1, 4])):
            many = chance.randrange(1, 3)
            calls = [called(number + i).tool_calls[0] for i in range(many)]  # type: ignore[index]
            messages.append(Message(role="assistant", tool_calls=calls))
            messages += [answered(number + i) for i in range(many)]
            number += many
        game = play(Conversation(messages), threshold, remembered=remembered)
        left = run(game, full)
        passes += game.passes
        assert tokens(left) <= threshold
        assert left.system == [m for m in messages if m.role == "system"]
        others = [m for m in messages if m.role != "system"]
        kept = left.others
        assert max(i for i, m in enumerate(messages) if m.role == "user") == max(
            i for i, m in enumerate(messages) if any(m is k for k in kept) and m.role == "user"
        )
        tail = [m for m in kept if m.role != "user"]
        assert tail == [m for m in others if any(m is k for k in tail)]
        ids = {c.id for m in kept for c in m.tool_calls or ()}
        assert all(m.tool_call_id in ids for m in kept if m.role == "tool")
        assert game.result[1] == len(others) - len(kept)
        same = (left.summary, game.result[1]) == before
        assert (game.passes == 0) == same  # each summary is written once
        before = left.summary, game.result[1]
        fresh = play(Conversation(messages), threshold)  # of another server
        assert run(fresh, full) == left
        messages.append(said("assistant", chance.randrange(1, 20), "a"))
    assert passes > 3


def test_calls_of_the_last_turn() -> None:
    """An agent's one turn: what the user wanted stays, and so do the latest results."""
    steps = [m for i in range(20) for m in (called(i), answered(i, 10))]
    talk = Conversation([said("system", 5), said("user", 12, "task"), *steps])
    left = run(play(talk, 150))
    assert left.others[0] is talk.messages[1]
    assert left.others[1:] == steps[-len(left.others) + 1 :]
    assert left.others[1].tool_calls
    assert tokens(left) <= 150


def test_a_long_history_is_summarised_in_parts() -> None:
    """Longer than the model: every part of it is read."""
    read: set[str] = set()

    def summary(question: Any) -> str:
        read.update(question.text.split())
        return "s"

    turns = [said(("user", "assistant")[i % 2], 20, f"t{i}") for i in range(101)]
    left = run(play(Conversation(turns), 10**9, max_len=400), summary)
    kept = {m.content.split()[0] for m in left.others}  # type: ignore[union-attr]
    assert read | kept >= {f"t{i}" for i in range(101)}


def test_forced() -> None:
    turns = [said(("user", "assistant")[i % 2], 3, f"t{i}") for i in range(6)]
    game = play(Conversation(turns), 1000, forced=True)
    assert run(game).others == turns[-2:]
    assert game.result[1] == 4
    with pytest.raises(ApiError, match="nothing to summarise: of 2 beside the system"):
        run(play(Conversation(turns[:2]), 1000, forced=True))
    again = Conversation([*game.result[0].messages, *turns[:2]], game.result[0].summary)
    assert run(play(again, 1000, forced=True)).others == turns[:2]


def test_one_large_turn_stays_as_it_is() -> None:
    talk = Conversation([said("user", 500)])
    assert run(play(talk, 200)) is talk
    longer = [said("user", 20), said("assistant", 20), said("user", 500, "big")]
    left = run(play(Conversation(longer), 200))
    assert left.others == longer[2:]


def test_no_room_for_a_summary() -> None:
    turns = [said(("user", "assistant")[i % 2], 60) for i in range(5)]
    with pytest.raises(ApiError) as small:
        run(play(Conversation([said("system", 150), *turns]), 160))
    assert (small.value.param, small.value.code) == ("field", "compaction_impossible")
    assert "compact_threshold is 160 tokens, but the system's messages" in small.value.message
    assert "a summary of up to 20 tokens take 181. Raise it to 362 or more" in small.value.message
    with pytest.raises(ApiError, match="Raise it to 264 or more, or shorten them"):
        run(play(Conversation([said("system", 150), *turns]), 160, max_len=301))
    with pytest.raises(ApiError) as never:
        run(play(Conversation([said("system", 250), *turns]), 160, max_len=301, reserve=41))
    assert "take 281. Shorten them: beside an answer of up to 41 tokens" in never.value.message
    assert "a prompt may have 227 of this model's 301" in never.value.message
    with pytest.raises(
        ApiError, match="of up to 900 tokens a prompt may have 100 of this model's 1,000"
    ):
        run(play(Conversation([said("system", 150), *turns]), 10**30, max_len=1000, reserve=900))


def test_what_cant_be_parted() -> None:
    talk = Conversation([said("user", 2000, "a"), said("assistant", 10), said("user", 10)])
    with pytest.raises(ApiError, match=r"from the 1st beside the system's\) has about 2,0\d\d"):
        run(play(talk, 300, max_len=1000))


def test_so_many_summaries_and_no_more() -> None:
    """What needs too many is told so before the first is written, where sizes say so."""
    turns = [said(("user", "assistant")[i % 2], 60) for i in range(4001)]
    game = play(Conversation(turns), 200, max_len=300)
    begun = time.perf_counter()
    with pytest.raises(ApiError, match=f"more than {MOST_PASSES} summaries"):
        run(game)
    assert game.passes == 0
    assert time.perf_counter() - begun < 5.0
    forced = play(Conversation(turns), 200, max_len=300, forced=True)
    with pytest.raises(ApiError, match=f"more than {MOST_PASSES} summaries"):
        run(forced)
    assert forced.passes == 0
    game = play(Conversation([said(m.role, 1) for m in turns]), 200, max_len=300)
    with pytest.raises(ApiError, match=f"more than {MOST_PASSES} summaries"):
        run(game)
    assert game.passes == MOST_PASSES  # nearly all of it is what the template writes


@pytest.mark.parametrize("words", [7, 20, 60, 90])
def test_nobody_is_refused_who_needs_no_more(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is told before the first, so many summaries are needed, however short they are."""
    told = []
    for number in range(101, 1402, 100):
        turns = [said(("user", "assistant")[i % 2], words) for i in range(number)]
        game = play(Conversation(turns), 200, max_len=300)
        try:
            run(game, lambda _: "x")
        except ApiError:
            told.append(game.passes == 0)
            with monkeypatch.context() as patch:
                patch.setattr(Play, "_needs_too_many", lambda _: False)
                with pytest.raises(ApiError, match="more than 64 summaries"):
                    run(play(Conversation(turns), 200, max_len=300), lambda _: "x")
    assert any(told)


def test_a_flood_of_text_takes_no_time() -> None:
    turns = [said(("user", "assistant")[i % 2], 100_000) for i in range(51)]
    begun = time.perf_counter()
    with pytest.raises(ApiError, match="can't be parted"):
        run(play(Conversation(turns), 300))
    assert time.perf_counter() - begun < 2.0


def test_an_item_holds_a_conversation() -> None:
    talk = Conversation(
        [said("system", 3), said("user", 3, "ö"), called(1), answered(1), said("assistant", 2)],
        "A summary 😀",
    )
    text = sealed(talk)
    assert unsealed(text, "place") == talk
    assert text.isascii()
    again = unsealed(text, "place").others
    assert again[1].tool_calls and again[1].tool_calls[0].function.name == "f"


def test_an_item_unpacks_to_no_flood() -> None:
    """Of a few bytes, no megabytes; what repeats itself goes through all the same."""
    plain = b'{"system": [], "summary": "' + b"a" * (40 << 20) + b'", "kept": []}'
    packed = zlib.compress(plain, 9)
    digest = hashlib.sha256(packed).digest()[:16]
    bomb = "penstock1." + base64.urlsafe_b64encode(digest + packed).decode()
    assert len(bomb) < 60_000
    begun = time.perf_counter()
    with pytest.raises(ApiError, match="isn't that of a compaction item"):
        unsealed(bomb, "place")
    assert time.perf_counter() - begun < 0.5
    talk = Conversation([said("user", 1 << 20)], "s")
    text = sealed(talk)
    assert unsealed(text, "place") == talk
    said_bytes = len(talk.messages[0].model_dump_json())
    assert said_bytes / 100 < len(text) < said_bytes / 40  # it isn't sent unpacked


def test_an_item_that_would_be_too_large_is_never_given() -> None:
    talk = Conversation([said("user", 18 << 20)], "s")
    with pytest.raises(ApiError, match=r"have 3\d,\d{3},\d{3} bytes; a compaction item holds 33,5"):
        sealed(talk)


def test_what_summaries_cost() -> None:
    assert Spent(3, 1, 20, 10, 5).as_dict() == {
        "messages": 3, "passes": 1, "input_tokens": 20, "cached_tokens": 10, "output_tokens": 5,
    }  # fmt: skip

"""Long conversations: what is left of them fits, and begins as it did a turn before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.server import ServerConfig
from penstock.server.conversation import Prompts
from penstock.server.errors import ApiError
from penstock.server.prompt import Rendering
from penstock.server.protocol.chat import Message
from penstock.server.retention import first_kept

from .conftest import Running, serving

TURNS = 50
SAID = "The dog ran to the sea and back again, and then it slept under a tree. "


def conversation(turns: int) -> list[dict[str, str]]:
    """It ends with the user's turn of that number, from 0."""
    messages = [{"role": "system", "content": "You tell stories of dogs."}]
    for turn in range(turns + 1):
        messages.append({"role": "user", "content": f"{turn}: {SAID * (1 + turn % 3)}"})
        messages.append({"role": "assistant", "content": f"And {turn} {SAID}"})
    return messages[:-1]


@pytest.fixture(scope="module")
def chats() -> Iterator[Running]:
    with serving(ServerConfig(), model="stories-chat") as running:
        yield running


def ask(running: Running, turns: int, truncation: Any) -> tuple[dict[str, Any], int]:
    body = {
        "model": "stories", "messages": conversation(turns), "max_tokens": 40, "temperature": 0,
        "truncation": truncation,
    }  # fmt: skip
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"], int(answer.headers.get("x-penstock-dropped-messages", 0))


def test_fifty_turns_stay_within_limits(chats: Running) -> None:
    """Each fits with its answer; most are found in the cache, and nothing is left behind."""
    computed = {}
    for name, truncation in (
        ("auto", "auto"),
        ("ratio", {"type": "retention_ratio", "retention_ratio": 0.6}),
    ):
        found, dropped, changes = 0, [0], 0
        for turn in range(TURNS):
            usage, gone = ask(chats, turn, truncation)
            assert usage["prompt_tokens"] + 40 <= 1024
            found += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert gone >= dropped[-1]
            changes += gone != dropped[-1]
            dropped.append(gone)
        computed[name] = found, changes
        assert dropped[-1] > 60
        assert chats.rest()["used_blocks"] == 0
    assert computed["auto"][1] > 30  # nearly each turn begins otherwise
    assert computed["ratio"][1] < 10
    assert computed["ratio"][0] < 0.5 * computed["auto"][0]


def test_the_same_is_left_out_until_it_is_too_much_again(chats: Running) -> None:
    prompts = Prompts(chats.service.prompts.tokenizer, 400)
    starts = []
    for turn in range(30):
        messages = [Message(**one) for one in conversation(turn)]
        made = prompts.of_messages(
            messages, Rendering(), truncation="auto", retention=0.5, reserve=20
        )
        assert len(made.tokens) + 20 <= 400
        assert (made.text or "").count("stories of dogs") == 1
        assert f"{turn}: " in (made.text or "")
        starts.append(made.dropped)
    runs = [starts.count(each) for each in dict.fromkeys(starts)]
    assert starts == sorted(starts) and max(runs) >= 3
    whole = prompts.of_messages(
        [Message(**one) for one in conversation(29)], Rendering(), truncation="auto", reserve=20
    )
    assert whole.dropped <= starts[-1]  # as much as fits


@pytest.mark.parametrize("retention", [0.5, 0.8, 0.3])
def test_played_through(retention: float) -> None:
    """Each request of a conversation comes to what the one before has kept, or less."""
    sizes = [7 + (i * 13) % 29 for i in range(120)]
    starts = list(range(0, 120, 2))
    room, fixed, kept = 300, 20, []
    for end in range(1, 120, 2):
        at = first_kept(
            sizes[:end], [s for s in starts if s < end], list(range(1, end + 1, 2)),
            fixed, room, retention,
        )  # fmt: skip
        left = fixed + sum(sizes[starts[at] : end])
        assert left <= room
        if kept and at != kept[-1]:
            assert left <= retention * room + max(sizes) * 2
        kept.append(at)
    assert kept == sorted(kept) and kept[0] == 0
    # it isn't the conversation's length that decides, but where it was too long
    assert len(set(kept)) < 0.7 * len(kept)


def test_a_last_turn_that_is_too_long_stays() -> None:
    assert first_kept([500], [0], [1], 20, 300, 0.5) == 0
    assert first_kept([10, 10, 500], [0, 2], [1, 3], 20, 300, 0.5) == 1


def test_what_fits_stays_whole(chats: Running) -> None:
    """Whatever its messages' texts may seem to take: templates leave out earlier reasoning."""
    prompts = Prompts(chats.service.prompts.tokenizer, 400)
    for turn in range(3):
        messages = [Message(**one) for one in conversation(turn)]
        made = prompts.of_messages(messages, Rendering(), truncation="auto", retention=0.2)
        assert made.dropped == 0


def test_a_flood_of_text_takes_no_time(chats: Running) -> None:
    prompts = Prompts(chats.service.prompts.tokenizer, 1024)
    flood = [Message(role=("user", "assistant")[i % 2], content=SAID * 4000) for i in range(25)]
    flood.append(Message(role="user", content=SAID))
    begun = time.perf_counter()
    with suppress(ApiError):
        prompts.of_messages(flood[1:], Rendering(), truncation="auto", retention=0.5)
    assert time.perf_counter() - begun < 2.0  # 7 MB; to split all of it took 6 s


def test_refusals(chats: Running) -> None:
    for ratio, why in ((0, "above 0.0"), (1.5, "at most 1.0"), ("x", "must be a number")):
        asked = {"type": "retention_ratio", "retention_ratio": ratio}
        with chats.client() as client:
            body = {"messages": conversation(0), "truncation": asked}
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and why in answer.text
        assert answer.json()["error"]["param"] == "truncation.retention_ratio"
    for wrong in ("on", 5, ["auto"], True):
        with chats.client() as client:
            body = {"messages": conversation(0), "truncation": wrong}
            answer = client.post("/v1/chat/completions", json=body)
        said = answer.json()["error"]
        assert (answer.status_code, said["param"]) == (400, "truncation")
        assert "send 'disabled', 'auto' or {\"type\": \"retention_ratio\"" in said["message"]
    with pytest.raises(ConfigError, match="has no effect where too long conversations are refused"):
        ServerConfig(truncation_retention=0.8)
    for share in (0.0, 1.2, -1.0):
        with pytest.raises(ConfigError, match="must be a share above 0"):
            ServerConfig(truncation="auto", truncation_retention=share)


def test_the_servers_setting() -> None:
    """Of all conversations, where a request says nothing else."""
    config = ServerConfig(truncation="auto", truncation_retention=0.5)
    with serving(config, model="stories-chat") as running:
        _, own = ask(running, 40, None)
        _, most = ask(running, 40, {"type": "retention_ratio", "retention_ratio": 1.0})
    assert own > most > 0

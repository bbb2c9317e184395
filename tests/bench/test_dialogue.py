"""`penstock eval --dialogues`: tool calls are read, replies counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.stories import POSITIONS

from penstock.bench import dialogue
from penstock.bench.dialogue import (
    Conversation,
    DialogueScore,
    calls_of,
    expected_calls,
    read_conversations,
    score_dialogues,
)
from penstock.config import EngineConfig
from penstock.engine import CompletionOutput
from penstock.errors import ConfigError
from penstock.models.hub import resolve
from penstock.runtime import load_runtime
from penstock.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def block(call: Any) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_tool_calls_in_a_reply() -> None:
    one, two = {"name": "find", "arguments": {"a": 1}}, {"name": "book"}
    assert calls_of("Hello.") == []
    assert calls_of(f"Yes. {block(one)}\n{block(two)}") == [("find", {"a": 1}), ("book", {})]
    tagged = {"a": "</tool_call> and <tool_call>"}
    assert calls_of(block({"name": "find", "arguments": tagged})) == [("find", tagged)]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>find()</tool_call>", block([1]), block({"arguments": {}}),
     block({"name": "find", "arguments": "x"}), "<tool_call></tool_call>",
     '<tool_call>{"name": "find"}', block({"name": "find"}) + '<tool_call>{"name": "find"} and',
     "<tool_call>" + "[" * 100_000],
)  # fmt: skip
def test_tool_calls_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calls_of(text)


def test_tool_calls_of_a_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    plain = {"name": "g", "arguments": {"y": 2}}
    assert expected_calls({"tool_calls": [call, plain]}) == [("f", {"x": [1]}), ("g", {"y": 2})]
    assert expected_calls({"content": "Hi", "tool_calls": None}) == []


AS_WRITTEN = {"b": 1.0, "a": True}
"""To Python the same as {"a": 1, "b": 1}."""


@pytest.mark.parametrize(
    ("text", "ended", "wanted", "valid", "exact", "named", "uncalled"),
    [
        ("Hello.", True, [], 1, 0, 0, 0),
        ("Hello.", False, [], 0, 0, 0, 0),
        (" ", True, [], 0, 0, 0, 0),
        (block({"name": "find", "arguments": {}}), True, [], 1, 0, 0, 1),
        (block({"name": "find", "arguments": {"a": 1}}), True, [("find", {"a": 1})], 1, 1, 1, 0),
        (block({"name": "find", "arguments": {"a": 2}}), True, [("find", {"a": 1})], 1, 0, 1, 0),
        (block({"name": "other", "arguments": {}}), True, [("find", {})], 0, 0, 0, 0),
        ("<tool_call>{</tool_call>", True, [("find", {})], 0, 0, 0, 0),
        ('<tool_call>{"name": "find"}', True, [("find", {})], 0, 0, 0, 0),
        (block({"name": "find", "arguments": AS_WRITTEN}), True,
         [("find", AS_WRITTEN)], 1, 1, 1, 0),
        (block({"name": "find", "arguments": {**AS_WRITTEN, "a": 1}}), True,
         [("find", AS_WRITTEN)], 1, 0, 1, 0),
        (block({"name": "find", "arguments": {**AS_WRITTEN, "b": 1}}), True,
         [("find", AS_WRITTEN)], 1, 0, 1, 0),
        ("<tool_call>" + "[" * 100_000, True, [], 0, 0, 0, 0),
    ],
)  # fmt: skip
def test_counting(
    text: str, ended: bool, wanted: Any, valid: int, exact: int, named: int, uncalled: int
) -> None:
    score = DialogueScore("x", 1)
    dialogue._count(score, text, ended, wanted, {"find"})
    assert (score.replies, score.ended, score.valid) == (1, ended, valid)
    assert (score.exact, score.named, score.uncalled_for) == (exact, named, uncalled)
    shares = score.as_dict()
    assert shares["format_validity"] == valid
    assert shares["tool_call_exact_match"] == (exact if wanted else None)


def test_replies_of_the_embedded_model() -> None:
    """Every reply is generated from the true conversation before it; a story ends by itself."""
    config = EngineConfig.of(model="stories", max_num_seqs=4)
    ask = {"role": "user", "content": "Tell me a story about a frog."}
    talk = [ask, {"role": "assistant", "content": "No."}, ask, {"role": "assistant", "content": ""}]
    calling = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    conversations = [Conversation(talk, None), Conversation([ask, calling], [TOOL])]
    score = score_dialogues(config, load_runtime(config), "x", conversations, max_tokens=300)
    assert (score.replies, score.calling, score.exact, score.uncalled_for) == (3, 1, 0, 0)
    assert 1 <= score.ended <= 3
    cut = score_dialogues(config, load_runtime(config), "x", conversations[:1], max_tokens=3)
    assert (cut.replies, cut.ended, cut.valid) == (2, 0, 0)
    most = POSITIONS - 1
    long = score_dialogues(config, load_runtime(config), "x", conversations, max_tokens=most)
    # a prompt and that many tokens are more than the model reads
    assert (long.replies, long.left_out, cut.left_out) == (0, 3, 0)
    assert long.as_dict()["left_out"] == 3


def test_a_call_may_be_closed_by_the_token_that_ends_its_reply() -> None:
    tokenizer = Tokenizer.from_folder(resolve("stories-chat"))
    (close,) = tokenizer.encode("</tool_call>", add_special_tokens=False)
    call = '<tool_call>{"name": "find"}'
    for text, last, reason, closed in [
        (call, close, "stop", True),
        (call, 0, "stop", False),
        (call, close, "length", False),
        (f"{call}</tool_call>", close, "stop", False),
    ]:
        sample = CompletionOutput(0, text, [1, last], finish_reason=reason)
        assert dialogue._closed(sample, tokenizer) == text + "</tool_call>" * closed


def test_files_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file.write_text(f"{json.dumps(good)}\n\n{json.dumps({**good, 'tools': [TOOL]})}\n")
    one, two = read_conversations(file)
    assert one.tools is None and two.tools == [TOOL] and one.messages == good["messages"]
    assert len(read_conversations(file, 1)) == 1
    text = json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}, good["messages"][1]]})
    file.write_text(text.replace("\\u2028", "\u2028"), encoding="utf-8-sig")  # legal in JSON
    assert read_conversations(file)[0].messages[0]["content"] == "a\u2028b"
    file.write_bytes(b"\x87\xff")
    with pytest.raises(ConfigError, match="isn't UTF-8"):
        read_conversations(file)
    for text, words in [
        ("", "holds no conversation"),
        ("[" * 100_000, "line 1 isn't a conversation"),
        (json.dumps({**good, "tools": [{"name": ["x"]}]}), "isn't a string"),
        ("{", "line 1 isn't a conversation"),
        ('{"messages": 3}', "line 1 isn't a conversation"),
        ('{"messages": [{"content": "a"}]}', "line 1 isn't a conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1 has no reply"),
        (json.dumps({**good, "tools": "weather"}), "line 1 isn't a conversation"),
        (json.dumps({**good, "tools": [5]}), "line 1 isn't a conversation"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_conversations(file)

"""Each family's reader on recorded outputs, whole and cut anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.tools.events import Arguments, Begin, Broken, End, Event, Parsed, collect
from penstock.server.tools.families import HERMES, REASONING_PARSERS, TOOL_PARSERS
from penstock.server.tools.plain import PlainReader, SpecialFilter
from penstock.server.tools.reader import CallReader
from penstock.server.tools.reasoning import ThinkReader, ThinkTags
from tests.server.tools.recorded import RECORDED, SCHEMAS, Row

ROWS = [(family, row) for family, rows in RECORDED.items() for row in rows]
TAGS = ThinkTags("<think>", "</think>")
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def reader(family: str) -> CallReader:
    return TOOL_PARSERS[family].reader(SCHEMAS)


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def fed(made: CallReader | ThinkReader, parts: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    for part in parts:
        events += made.feed(part)
    return events + made.finish()


@pytest.mark.parametrize(("family", "row"), ROWS, ids=[f"{f}: {r[0]}" for f, r in ROWS])
def test_recorded(family: str, row: Row) -> None:
    _, text, content, calls = row
    found = reader(family).parse(text)
    assert [(x.name, json.loads(x.arguments)) for x in found.calls] == calls
    assert found.content == content
    # The same a character at a time, and the reader goes on behind what is wrong.
    assert collect(fed(reader(family), list(text))) == found
    if not content:
        between = "<|start|>assistant" if family == "openai" else "\n"
        assert reader(family).parse(text + between + text).calls == 2 * found.calls


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_cuts_say_the_same(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(RECORDED)))
    rows = data.draw(st.lists(st.sampled_from(RECORDED[family]), min_size=1, max_size=3))
    noise = data.draw(st.sampled_from(["", " ", "\n", "<", "{", "[", "text <tool_call>{", "</"]))
    text = noise.join(row[1] for row in rows)
    if data.draw(st.booleans()):  # something goes wrong somewhere
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(['"', "}", "\\", "\x00", "]", ""]))
            + text[at + 1 :]
        )
    whole = reader(family).parse(text)
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=12))
    assert collect(fed(reader(family), pieces(text, cuts))) == whole
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(
    st.sampled_from(sorted(RECORDED)), st.text("{}[]<>|_=/\"\\:,. \n'()atool_cfunin", max_size=60)
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(family: str, text: str) -> None:
    whole = reader(family).parse(text)
    assert collect(fed(reader(family), list(text))) == whole
    if not whole.calls and family not in ("openai", "pythonic"):
        assert whole.content == text  # nothing is lost


@pytest.mark.parametrize("family", sorted(RECORDED))
def test_arguments_come_as_they_are_written(family: str) -> None:
    """A long text isn't held back until the call has ended, but where it must be put into JSON."""
    _, text, _, calls = next(row for row in RECORDED[family] if len(row[3]) == 2)
    made = reader(family)
    events = [made.feed(character) for character in text]
    deltas = [x for batch in events for x in batch if isinstance(x, Arguments)]
    arguments = json.dumps(calls[0][1])
    least = 2 if family in ("qwen3_coder", "pythonic", "lfm2") else len(arguments) // 2
    assert len(deltas) > least
    kinds = [type(x) for batch in events for x in batch if not isinstance(x, Arguments)]
    assert kinds.count(Begin) == kinds.count(End) == 2


def test_a_broken_call_is_taken_back() -> None:
    made = HERMES.reader(SCHEMAS)
    events = made.feed('Hm. <tool_call>{"name": "note", "arguments": {"text": 1,,}} end')
    events += made.finish()
    assert [type(x) for x in events if not isinstance(x, Arguments)][1:3] == [Begin, Broken]
    assert collect(events).content == (
        'Hm. <tool_call>{"name": "note", "arguments": {"text": 1,,}} end'
    )


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ('{"a": -0.5e+3, "b": [0, true, null]}', True),
        ('{"a": 01}', False),
        ('{"a": +1}', False),
        ('{"a": .5}', False),
        ('{"a": 1.}', False),
        ('{"a": NaN}', False),
        ('{"a": "\t"}', False),
        ('{"a": "\\x41"}', False),
        ('{"a": "\\u12G4"}', False),
        ('{"a": "\\ud83d\\uDC38 \\u00e9"}', True),
        ('{"a": "\\ud83d"}', False),  # nobody could write it down
        ('{"a": "\\ud83d\\n"}', False),
        ('{"a": "\\ud83d \\udc38"}', False),
        ('{"a": "\\udc38\\ud83d"}', False),
        ('{"\\ud83d": 1}', False),
        ('{"a": 1e308}', True),
        ('{"a": -1e999}', False),
        ('{"a" 1}', False),
        ('{"a": 1 "b": 2}', False),
        ('{"a": 1,}', False),
        ('{"a": [1,]}', False),
        ("{a: 1}", False),
        ('{"a": {"b": ' * 40 + "1" + "}" * 80, False),  # deeper than a request may be
    ],
)
def test_only_json_is_taken(arguments: str, taken: bool) -> None:
    text = f"[TOOL_CALLS]note[ARGS]{arguments}"
    found = reader("mistral").parse(text)
    assert [x.arguments for x in found.calls] == ([arguments] if taken else [])
    assert found.content == ("" if taken else text)


def test_a_name_that_is_no_text() -> None:
    for name in ("1", "null", '""', '"\\ud800"', '"' + "x" * 300 + '"'):
        text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}'
        assert reader("hermes").parse(text) == Parsed(content=text)


# ── reasoning ────────────────────────────────────────────────────────────────────────────────


def thinking(inside: bool) -> ThinkReader:
    return ThinkReader(TAGS, inside, HERMES.reader(SCHEMAS), HERMES.reader(SCHEMAS))


THOUGHTS = [
    (False, "<think>\nhm\n</think>\n\nHi.", "hm", "Hi.", 0),
    (True, "hm </thin</think>\n\nHi. \n", "hm </thin", "Hi. \n", 0),
    (True, "never closed", "never closed", "", 0),
    (False, "Hi <think>no</think>", "", "Hi <think>no</think>", 0),
    (False, " <thi", "", " <thi", 0),
    (False, "<think>\n\n</think>\n\nHi.", "", "Hi.", 0),
    (False, f"<think>hm</think>Ok.\n{CALL}", "hm", "Ok.", 1),
    (True, f"hm\n{CALL}", "hm", "", 1),
    (True, f"hm\n{CALL}\n{CALL}</think>\n", "hm", "", 2),
    (True, f"I write {CALL} then</think>ok", f"I write {CALL} then", "ok", 1),
    (True, f"a draft {CALL}</think>{CALL}", f"a draft {CALL}", "", 1),
    (True, "I write <tool_call> and {x", "I write <tool_call> and {x", "", 0),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content", "calls"), THOUGHTS)
def test_reasoning_is_split_off(
    inside: bool, text: str, reasoning: str, content: str, calls: int
) -> None:
    found = collect(fed(thinking(inside), [text]))
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, calls)


@settings(deadline=None)
@given(st.sampled_from(THOUGHTS), st.lists(st.integers(0, 200), max_size=12))
def test_reasoning_in_any_pieces(row: tuple[bool, str, str, str, int], cuts: list[int]) -> None:
    inside, text = row[:2]
    whole = collect(fed(thinking(inside), [text]))
    assert collect(fed(thinking(inside), pieces(text, cuts))) == whole


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    assert TAGS.opened_by("<|im_start|>assistant\n<think>\n")
    assert not TAGS.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not TAGS.opened_by("What does <think> mean?<|im_start|>assistant\n")
    assert TAGS.left_open("<think>I wonder")
    assert not TAGS.left_open("<think>I wonder</think>It")


# ── texts without calls ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [PlainReader, lambda: reader("hermes")])
@settings(deadline=None)
@given(st.text(" \nab"), st.lists(st.integers(0, 50)))
def test_plain_text_stays(make: Callable[[], CallReader], text: str, cuts: list[int]) -> None:
    assert collect(fed(make(), pieces(text, cuts))) == Parsed(content=text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)))
def test_special_tokens_are_left_out(cuts: list[int]) -> None:
    text = "a<|eot|>b <|e<|eom|>c<|eo"
    seen = SpecialFilter(["<|eot|>", "<|eom|>"])
    parts = [seen.feed(part) for part in pieces(text, cuts)]
    assert "".join(parts) + seen.feed("", ended=True) == "ab <|ec<|eo"
    assert SpecialFilter([]).feed(text) == text


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<|channel>thought\nI see.\n<channel|>Yes.", "I see.", "Yes."),
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("<|channel>thoughtful<channel|>Yes.", "thoughtful", "Yes."),
        ("<|channel>thou", "thou", ""),
        ("thought\nYes.", "", "thought\nYes."),
    ],
)
def test_a_channel_with_a_name(text: str, thought: str, content: str) -> None:
    """Gemma 4's."""
    tags = REASONING_PARSERS["gemma4"]
    assert tags is not None
    for parts in ([text], list(text)):
        found = collect(fed(ThinkReader(tags, False, PlainReader(), PlainReader()), parts))
        assert (found.reasoning or "", found.content or "") == (thought, content)

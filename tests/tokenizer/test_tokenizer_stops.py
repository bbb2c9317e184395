"""Stop strings: against an oracle that looks at the whole text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenizer import IncrementalDetokenizer, Tokenizer
from penstock.tokenizer.stops import StopFinder

quick = settings(deadline=None, max_examples=300, database=None)
letters = st.sampled_from("ab日 ")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=5)
piece_lists = st.lists(st.text(letters, max_size=5), max_size=12)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(start, end, stop) of the stop string complete first; of two ending together the longer."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    ends = [(start, start + len(stop), stop) for start, stop in found]
    return min(ends, key=lambda match: (match[1], match[0]), default=None)


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = max(map(len, stops))
    return max(
        size
        for size in range(min(longest, len(text)) + 1)
        if any(stop.startswith(text[len(text) - size :]) and size < len(stop) for stop in stops)
    )


@quick
@given(pieces=piece_lists, stops=stop_lists)
def test_finder_agrees_with_the_oracle(pieces: list[str], stops: list[str]) -> None:
    finder, text = StopFinder(stops), ""
    for piece in pieces:
        match = finder.feed(piece)
        text += piece
        expected = first_stop(text, stops)
        if expected is not None:
            assert match is not None
            assert (match.start, match.end, match.stop) == expected
            return
        assert match is None
        assert finder.held == longest_beginning(text, stops)


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
@pytest.mark.parametrize("include", [False, True])
def test_detokenizer_cuts_at_the_oracles_place(
    name: str, include: bool, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.encode("x")
    shown = len(tokenizer.decode(prompt))
    # whole words are single tokens, so stops lie across, within and at the end of tokens
    words = st.lists(st.sampled_from(["stop", " the", " stopping", "日本", "\n", "ab", "🦙", " "]))
    stop_texts = st.lists(
        st.sampled_from(
            ["stop", "topp", " t", "th", "日", "本\n", "\n\n", "b🦙", "pthe", "op the"]
        ),
        min_size=1,
        max_size=4,
    )

    @quick
    @given(words=words, stops=stop_texts, size=st.integers(1, 4))
    def check(words: list[str], stops: list[str], size: int) -> None:
        ids = tokenizer.encode("x" + "".join(words))[len(prompt) :]
        text = tokenizer.decode(prompt + ids)[shown:]
        detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids=prompt, stop=stops, include_stop_str_in_output=include
        )
        deltas = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
        deltas.append(detokenizer.finish())
        found = first_stop(text, stops)
        if found is None:
            assert detokenizer.stop_reason is None
            assert "".join(deltas) == text
        else:
            start, end, stop = found
            assert detokenizer.stop_reason == stop
            assert "".join(deltas) == text[: end if include else start]
        assert detokenizer.text == "".join(deltas)

    check()


def test_text_that_may_begin_a_stop_is_held_back(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("gpt2")
    words = [tokenizer.encode(word) for word in ["Hello", " wor", "ld", " END", "ING"]]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=[], stop=["world peace", "ENDED"])
    assert [detokenizer.append(word) for word in words] == ["Hello", " ", "", "world ", "ENDING"]
    shown = IncrementalDetokenizer(
        tokenizer, prompt_ids=[], stop=["world peace"], include_stop_str_in_output=True
    )
    assert [shown.append(word) for word in words[:3]] == ["Hello", " wor", "ld"]


def test_stop_within_one_token_and_nothing_after(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("gpt2")
    ids = tokenizer.encode(" international")
    assert len(ids) == 1
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=[], stop=["nat"])
    assert detokenizer.append(ids) == " inter"
    assert detokenizer.stop_reason == "nat"
    assert detokenizer.append(ids) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.text == " inter"


def test_stop_completed_by_the_end(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """A broken character becomes U+FFFD only at the end; a stop string may contain it."""
    tokenizer = tokenizer_of("llama2")
    broken = 3 + 0xF0  # the byte token <0xF0>
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=[1], stop=["a\ufffd"])
    assert detokenizer.append([*tokenizer.encode("b a", add_special_tokens=False), broken]) == "b "
    assert detokenizer.finish() == ""
    assert detokenizer.stop_reason == "a\ufffd"


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * 1_000_000], "a" * 100_000 + "b"),
        (["ab" * 500_000], "ab" * 50_000 + "b"),
        (["\n" + "x" * 1_000_000], "some text\n" * 10_000),
        ([f"{chr(97 + i % 26)}{i}" for i in range(1_000)], "the quick brown fox " * 5_000),
        (["x" * i + "y" for i in range(1_000)], "x" * 100_000),
    ],
    ids=["one long", "periodic", "often begun", "a thousand", "nested"],
)
def test_costly_stop_strings_are_linear(stops: list[str], text: str) -> None:
    """100,000 characters; quadratic work would take minutes, not this generous bound."""
    started = time.process_time()
    finder = StopFinder(stops)
    for position in range(0, len(text), 4):
        assert finder.feed(text[position : position + 4]) is None
    assert time.process_time() - started < 5


def test_a_long_stop_string_that_does_match() -> None:
    stop = "abcdefghij" * 20_000
    finder = StopFinder([stop])
    assert finder.feed("xx" + stop[:-1]) is None
    assert finder.held == len(stop) - 1
    match = finder.feed("jj")
    assert match is not None
    assert (match.start, match.end) == (2, 2 + len(stop))

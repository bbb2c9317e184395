"""Streaming: the deltas are the one-shot decode, for any tokens and any chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidSamplingError, TokenizerError
from penstock.tokenizer import IncrementalDetokenizer, Tokenizer

NAMES = ["gpt2", "qwen2.5", "stories260K", "llama2"]
quick = settings(deadline=None, max_examples=120, database=None)
texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \nae🦙é日\u0301'")),
    max_size=40,
)
raw_ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 511)), max_size=40)
widths = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    position = turn = 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        yield list(ids[position : position + size])
        position, turn = position + size, turn + 1


def stream(detokenizer: IncrementalDetokenizer, ids: Sequence[int], sizes: Sequence[int]) -> str:
    deltas = [detokenizer.text, *(detokenizer.append(chunk) for chunk in chunks(ids, sizes))]
    assert "".join(deltas) == detokenizer.text
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text


@pytest.mark.parametrize("name", NAMES)
def test_any_text_streams_as_it_is(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(name)

    @quick
    @given(prompt=texts, output=texts, sizes=widths)
    def check(prompt: str, output: str, sizes: list[int]) -> None:
        prompt_ids = tokenizer.encode(prompt)
        ids = tokenizer.encode(prompt + output)[len(prompt_ids) :]
        expected = tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]
        if "\ufffd" in tokenizer.decode(prompt_ids) and "\ufffd" not in prompt:
            return  # the prompt ends in half a character: the next test
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
        assert stream(detokenizer, ids, sizes) == expected

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_stream_as_one_shot(
    name: str, skip: bool, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    """Ids below 512 are mostly single bytes: broken UTF-8, and special tokens in between."""
    tokenizer = tokenizer_of(name)
    special = sorted(tokenizer.special_ids)[:3]

    @quick
    @given(ids=st.lists(st.one_of(st.integers(0, 511), st.sampled_from(special))), sizes=widths)
    def check(ids: list[int], sizes: list[int]) -> None:
        prompt = tokenizer.encode("Hi there")
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        before = tokenizer.decode(prompt, skip_special_tokens=skip)
        whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
        assert stream(detokenizer, ids, sizes) == whole.removeprefix(before)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_without_a_prompt_the_text_starts_here(
    name: str, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(name)

    @quick
    @given(ids=raw_ids, sizes=widths)
    def check(ids: list[int], sizes: list[int]) -> None:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=start)
        assert stream(detokenizer, ids, sizes) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_half_characters_wait(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(name)
    single = {
        tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))
    }
    prompt = tokenizer.encode("x")
    llama = [single[bytes([byte])] for byte in "🦙".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    assert [detokenizer.append([token]) for token in llama] == ["", "", "", "🦙"]
    # cut off by the end, one U+FFFD
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    assert detokenizer.append(llama[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    # begun in the prompt: the output that completes it shows it …
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt + llama[:2])
    assert [detokenizer.append([token]) for token in llama[2:]] == ["", "🦙"]
    # … and one that doesn't isn't blamed for it
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt + llama[:2])
    assert detokenizer.append([single[b"x"]]) == "x"


def test_sentencepiece_keeps_the_space_after_a_prompt(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    for name in ("llama2", "stories260K"):
        tokenizer = tokenizer_of(name)
        word = tokenizer.encode("the", add_special_tokens=False)
        prompt = tokenizer.encode("Once")
        assert IncrementalDetokenizer(tokenizer, prompt_ids=prompt).append(word) == " the"
        bos = prompt[:1]
        assert IncrementalDetokenizer(tokenizer, prompt_ids=bos).append(word) == "the"
        assert IncrementalDetokenizer(tokenizer, prompt_ids=[]).append(word) == "the"


def test_special_tokens_show_on_request(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    ids = tokenizer.encode("a<|im_end|>b<tool_call>")
    hidden = IncrementalDetokenizer(tokenizer, prompt_ids=[])
    assert hidden.append(ids) == "ab<tool_call>"
    shown = IncrementalDetokenizer(tokenizer, prompt_ids=[], skip_special_tokens=False)
    assert shown.append(ids) == "a<|im_end|>b<tool_call>"


def test_wrong_use_says_so(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("gpt2")
    with pytest.raises(InvalidSamplingError, match="one-character"):
        IncrementalDetokenizer(tokenizer, prompt_ids=[], stop="ab")
    with pytest.raises(InvalidSamplingError, match=r"stop\[1\] of 2 is ''"):
        IncrementalDetokenizer(tokenizer, prompt_ids=[], stop=["a", ""])
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=[])
    detokenizer.finish()
    with pytest.raises(TokenizerError, match=r"after finish\(\)"):
        detokenizer.append([1])
    with pytest.raises(TokenizerError, match="negative"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [(), ("a", " t", "é", "\ufffd")])
def test_what_was_chosen_anew_is_not_text(
    name: str, stop: tuple[str, ...], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    """Any end of a prompt may be output instead: the text, and where it stops, stay the same."""
    tokenizer = tokenizer_of(name)

    @quick
    @given(ids=raw_ids, text=texts, sizes=widths, cuts=st.tuples(st.integers(), st.integers()))
    def check(ids: list[int], text: str, sizes: list[int], cuts: tuple[int, int]) -> None:
        ids = [*tokenizer.encode(text), *ids, *tokenizer.encode("a the é")]
        kept, end = sorted(cut % (len(ids) + 1) for cut in cuts)
        prompt = ids[:end]
        plain = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, stop=stop)
        expected = stream(plain, ids[end:], sizes)
        table = tokenizer.piece_table(skip_special_tokens=True)
        prefix = b"".join(table[token] for token in ids[kept:end])
        healed = IncrementalDetokenizer(
            tokenizer, prompt_ids=prompt, stop=stop, skip_bytes=len(prefix)
        )
        assert stream(healed, ids[kept:], sizes) == expected
        assert healed.stop_reason == plain.stop_reason

    check()


def test_a_stop_string_begins_behind_the_prompt(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("gpt2")
    prompt = tokenizer.encode("The link is http:")
    output = tokenizer.encode("The link is http://example.org/a//b")[len(prompt) - 1 :]
    assert tokenizer.token_bytes(output[0]) == b"://"

    def read(*stop: str) -> tuple[list[str], str | None]:
        one = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, stop=stop, skip_bytes=1)
        return [one.append([token]) for token in output], one.stop_reason

    assert read() == (["//", "example", ".", "org", "/", "a", "//", "b"], None)
    assert "".join(read("://", "http://")[0]) == "//example.org/a//b"
    assert read("//") == ([""] * 8, "//")
    assert read("/e")[0][:2] == ["/", ""]


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_may_count_from_a_token_on(
    name: str, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(name)

    @quick
    @given(first=texts, then=texts, stop=st.text("ae \n🦙", min_size=1, max_size=3))
    def check(first: str, then: str, stop: str) -> None:
        prompt = tokenizer.encode("Hi")
        ids = tokenizer.encode(first, add_special_tokens=False)
        more = tokenizer.encode(then, add_special_tokens=False)
        whole = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
        early = whole.append(ids)
        late = whole.append(more) + whole.finish()
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
        assert detokenizer.append(ids) == early
        detokenizer.look_for([stop])
        assert stream(detokenizer, more, [2]) == early + late.split(stop)[0]
        assert detokenizer.stop_reason == (stop if stop in late else None)

    check()

"""Token healing by itself: allowed tokens by brute force, kept ones by every continuation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidSamplingError, RequestError
from penstock.sampling import SamplingParams, num_words
from penstock.sampling.healing import Healed, PieceIndex, PrefixConstraint, heal

quick = settings(deadline=None, max_examples=200, database=None)
piece_lists = st.lists(
    st.text("ab\xf0", max_size=4).map(lambda t: t.encode("latin-1")), max_size=70
)
prefixes = st.text("ab\xf0", max_size=8).map(lambda t: t.encode("latin-1"))


def brute_force(pieces: Sequence[bytes], rest: bytes) -> set[int]:
    """The tokens that may come where `rest` is still to be written, tried one by one."""
    return {
        token
        for token, piece in enumerate(pieces)
        if piece
        and (
            piece.startswith(rest)
            or (rest.startswith(piece) and brute_force(pieces, rest[len(piece) :]))
        )
    }


def filled(constraint: PrefixConstraint, vocab_size: int) -> set[int]:
    bits = np.full(num_words(vocab_size), 0x55555555, dtype=np.int32)
    constraint.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert not flags[vocab_size:].any()
    return set(flags.nonzero()[0].tolist())


@quick
@given(pieces=piece_lists, prefix=prefixes, padding=st.integers(0, 40), choices=st.data())
def test_the_allowed_tokens_are_those_of_brute_force(
    pieces: list[bytes], prefix: bytes, padding: int, choices: st.DataObject
) -> None:
    size = len(pieces) + padding
    index = PieceIndex(pieces, size)
    if prefix and not brute_force(pieces, prefix):
        with pytest.raises(RequestError, match=f"{len(prefix)} bytes"):
            PrefixConstraint(prefix, index)
        return
    constraint = PrefixConstraint(prefix, index)
    states: list[tuple[set[int], list[int]]] = []
    rest = prefix
    while rest:
        allowed = brute_force(pieces, rest)
        assert filled(constraint, size) == allowed
        assert not constraint.is_over
        assert not constraint.may_end
        assert bool(constraint.forced()) == (len(allowed) == 1)
        states.append((allowed, constraint.forced()))
        outside = set(range(-1, size + 1)) - allowed
        with pytest.raises(RequestError, match=f"{len(rest)} bytes"):
            constraint.accept(choices.draw(st.sampled_from(sorted(outside))))
        token = choices.draw(st.sampled_from(sorted(allowed)))
        before = constraint.fork()
        constraint.accept(token)
        assert filled(before, size) == allowed
        rest = rest[len(pieces[token]) :]
    everything = set(range(size))
    assert constraint.is_over
    assert constraint.may_end
    assert not constraint.is_complete
    assert constraint.forced() == []
    assert filled(constraint, size) == everything
    constraint.accept(size - 1)  # whatever it is: nothing is limited any more
    constraint.accept(0)
    constraint.rollback(2)
    assert filled(constraint, size) == everything
    for allowed, forced in reversed(states):
        constraint.rollback(1)
        assert (filled(constraint, size), constraint.forced()) == (allowed, forced)
    with pytest.raises(RequestError, match="1 tokens can't be taken back of 0"):
        constraint.rollback(1)


def test_what_is_the_only_way_is_forced_to_the_prefix_end() -> None:
    pieces = [b"x", b"yz", b"w", b"wv", b""]
    constraint = PrefixConstraint(b"xyzxw", PieceIndex(pieces, len(pieces)))
    assert constraint.forced() == [0, 1, 0]
    for token in (0, 1, 0):
        constraint.accept(token)
    assert filled(constraint, 5) == {2, 3}
    constraint.accept(2)
    constraint.accept(4)  # a special token may end the text now
    constraint.rollback(3)
    assert constraint.forced() == [0]


def test_a_token_from_which_the_prefix_cannot_be_completed_may_not_come() -> None:
    pieces = [b"a", b"ab", b"abc", b"c"]  # after "a" there is no "b"
    constraint = PrefixConstraint(b"abc", PieceIndex(pieces, len(pieces)))
    assert filled(constraint, 4) == {1, 2}


def toy_tokenizer(joins: Sequence[tuple[int, int]]) -> tokenizers.Tokenizer:
    """BPE over a, b, c; each join merges two of the tokens there are, by their numbers."""
    names = ["a", "b", "c"]
    merges = []
    for left, right in joins:
        one, other = names[left % len(names)], names[right % len(names)]
        if one + other not in names:
            names.append(one + other)
            merges.append((one, other))
    vocabulary = {name: i for i, name in enumerate(names)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))


@quick
@given(
    joins=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12),
    prompt=st.text("abc", min_size=1, max_size=9),
)
def test_no_continuation_changes_a_kept_token(joins: list[tuple[int, int]], prompt: str) -> None:
    tokenizer = toy_tokenizer(joins)
    size = tokenizer.get_vocab_size()
    pieces = [(tokenizer.id_to_token(i) or "").encode() for i in range(size)]
    longest = max(map(len, pieces))
    assume(longest < 12)
    special = size  # before all, as BOS is
    index = PieceIndex([*pieces, b""], size + 1)
    ids = tokenizer.encode(prompt).ids
    healed = heal([special, *ids], index, lambda data: tokenizer.encode(data.decode()).ids)
    kept = healed.kept[1:]
    assert healed.kept[0] == special
    assert kept == ids[: len(kept)]
    assert healed.prefix == b"".join(pieces[i] for i in ids[len(kept) :])
    for length in range(1, 5):
        for more in itertools.product("abc", repeat=length):
            natural = tokenizer.encode(prompt + "".join(more)).ids
            assert natural[: len(kept)] == kept
            assert index.longest == longest


def plain(data: bytes) -> list[int]:
    return list(data)


def test_what_is_not_taken_back() -> None:
    pieces = [bytes([i]) for i in range(256)] + [b"http", b"://", b"", b"ab"]
    index = PieceIndex(pieces, 300)
    # nothing longer begins with "z" or "b"
    assert heal([104, 122], index, plain) == Healed([104, 122], b"")
    assert heal([258, 97, 98], index, plain) == Healed([258, 97, 98], b"")
    # the first token, special ones and what lies before them stay, as do padding rows
    assert heal([58], index, plain) == Healed([58], b"")
    assert heal([256, 58], index, plain) == Healed([256], b":")
    assert heal([258, 58], index, plain) == Healed([258], b":")
    assert heal([104, 116, 258], index, plain) == Healed([104, 116, 258], b"")
    assert heal([104, 258, 116, 58, 47], index, plain) == Healed([104, 258, 116], b":/")
    assert heal([104, 299, 58], index, plain) == Healed([104, 299], b":")
    assert heal([58], PieceIndex([], 300), plain) == Healed([58], b"")


def test_more_pieces_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 pieces for a vocabulary of 2"):
        PieceIndex([b"a", b"b", b"c"], 2)


def test_parameters_that_cannot_stand_beside_it() -> None:
    assert SamplingParams(token_healing=True, stop="a", logprobs=2, n=2).token_healing
    with pytest.raises(InvalidSamplingError, match="token_healing is 1"):
        SamplingParams(token_healing=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidSamplingError, match="structured_outputs holds"):
        SamplingParams(token_healing=True, structured_outputs={"regex": "a+"})
    with pytest.raises(InvalidSamplingError, match=r"echo with logprobs\) is 0"):
        SamplingParams(token_healing=True, prompt_logprobs=0)

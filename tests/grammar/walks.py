"""Random walks under a constraint's masks, as a model that knows nothing would write."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from penstock.sampling.constraint import Constraint, num_words
from penstock.tokenizer import Tokenizer


def allowed(state: Constraint, vocab_size: int) -> list[int]:
    """The tokens of the next mask."""
    bits = np.full(num_words(vocab_size), -1, dtype=np.int32)
    state.fill(bits)
    every = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert not every[vocab_size:].any()
    found: list[int] = np.flatnonzero(every).tolist()
    return found


def closing(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a part, which a walk favours so that it ends."""
    ends = {b'"', b"}", b"]", b")", b'"}', b'"]', b"\n", b";", b".", b"="}
    return frozenset(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in ends)


def walk(
    state: Constraint,
    vocab_size: int,
    eos: Iterable[int],
    rng: random.Random,
    *,
    favoured: frozenset[int] = frozenset(),
    limit: int = 600,
) -> list[int] | None:
    """Tokens to a place where the text may end; None where it isn't reached in time.

    At each step, what the state says of itself agrees with its mask.
    """
    ids: list[int] = []
    ends = set(eos)
    while len(ids) < limit:
        tokens = allowed(state, vocab_size)
        going_on = [i for i in tokens if i not in ends]
        assert len(tokens) - len(going_on) == (len(ends) if state.may_end else 0)
        assert state.is_complete == (not going_on)
        if state.is_complete or (state.may_end and rng.random() < 0.3):
            return ids
        short = [i for i in going_on if i in favoured]
        rush = short and rng.random() < 0.2 + 2 * len(ids) / limit
        ids.append(rng.choice(short if rush else going_on))
        state.accept(ids[-1])
    return None


def text_of(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Their bytes, which must be UTF-8."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode()

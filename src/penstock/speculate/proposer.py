"""Drafts of what may come next, and who makes them.

A draft is a guess: verifying it computes its tokens' logits in one step, and the sampler then says
what it would have chosen at each place. Up to the first place where that is another token, guess
and choice are the same, and so are logits, masks, penalties and random numbers. So the output is
the one that plain decoding gives, token for token, at any temperature; a proposer decides only how
fast.
Source: Leviathan, Kalman & Matias 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. Their
test, accept or draw again, is replaced by the sampler's own draw, with the place's random number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import RequestError
from penstock.sampling import SequenceSampling


class Draft:
    """Tokens that may follow, and the sampler's state before each of them and after the last."""

    __slots__ = ("kind", "states", "tokens")

    def __init__(self, sampling: SequenceSampling) -> None:
        """Of no tokens; sampling: the sequence's own state, which no draft changes."""
        self.tokens: list[int] = []
        self.kind = 0  # guesses that are right about as often have the same
        self.states = [sampling]  # those after tokens that `extend` brought come with `settle`

    def add(self, token: int) -> bool:
        """Go on with `token`; False if the sequence couldn't, and then the draft ends before it."""
        try:
            after = self.states[-1].fork(token)
        except RequestError:  # a grammar forbids it
            return False
        self.tokens.append(token)
        self.states.append(after)
        return True

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with `tokens`, though the sequence mayn't: `settle` will see."""
        self.tokens += tokens

    def settle(self, length: int) -> None:
        """Keep the first `length` tokens, or as many of them as the sequence could go on with."""
        tokens = self.tokens[len(self.states) - 1 : length]
        del self.tokens[min(len(self.states) - 1, length) :], self.states[length + 1 :]
        for token in tokens:
            if not self.add(token):
                return

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence whose last token is the only one to be computed, and that wants a draft."""

    key: object  # the same one for the same sequence; compared by identity
    tokens: list[int]  # all of it so far, not to be changed
    sampling: SequenceSampling
    blocks: list[int]  # its own, with room for len(tokens) - 1 + limit tokens
    limit: int  # of tokens in the draft, at least 1
    salt: str | None = None  # what it brings forth may be seen by those of the same only


class Proposer(Protocol):
    """Guesses."""

    name: str
    """What speculative_config calls it."""

    by_passes: bool
    """Whether each token of a draft takes a pass of a model; else a draft costs next to nothing."""

    @property
    def last_caught_up(self) -> int:
        """Tokens of sequences that the last call of `propose` had to read before it could guess."""

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, of no tokens where it has no guess."""

    def forget(self, key: object) -> None:
        """The sequence of that key has ended."""

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

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.errors import RequestError
from penstock.sampling import SequenceSampling
from penstock.speculate.prediction import KIND, Prediction

ROOT = -1
"""What a draft's first tokens follow: the sequence's own last token."""


class Draft:
    """Tokens that may follow, and the sampler's state before the first and after each of them.

    One after another; or a tree, whose tokens say which one they follow: an earlier one.
    """

    __slots__ = ("_ways", "chances", "kind", "parents", "states", "tokens")

    def __init__(self, sampling: SequenceSampling) -> None:
        """Of no tokens; sampling: the sequence's own state, which no draft changes."""
        self.tokens: list[int] = []
        self.parents: list[int] | None = None  # ROOT or a token's place; None: the one before it
        self.chances: list[float] | None = None  # that a token and those before it are right
        self._ways: list[list[int]] | None = None  # of a tree, once they were asked for
        self.kind = 0  # guesses that are right about as often have the same
        self.states = [sampling]  # those after tokens that `extend` brought come with `settle`

    def add(self, token: int) -> bool:
        """Go on with `token`; False if the sequence couldn't, and then the draft ends before it."""
        after = _forked(self.states[-1], token)
        if after is None:
            return False
        self.tokens.append(token)
        self.states.append(after)
        return True

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with `tokens`, though the sequence mayn't: `settle` will see."""
        self.tokens += tokens

    def branch(
        self, tokens: Sequence[int], parents: Sequence[int], chances: Sequence[float]
    ) -> None:
        """Become the tree of `tokens`, of which none was there; likelier ones first.

        parents: of each, ROOT or the place of an earlier one; two that follow the same differ.
        chances: that it comes, and all of those before it on its way, by what guessed it.
        """
        self.tokens, self.parents, self.chances = list(tokens), list(parents), list(chances)
        self._ways = None

    def settle(self, length: int) -> None:
        """Keep the first `length` tokens, or those of them that the sequence could go on with."""
        if length >= len(self.tokens) < len(self.states):
            return  # it is
        if self.parents is not None:
            self._settle_tree(self.parents, length)
            return
        tokens = self.tokens[len(self.states) - 1 : length]
        del self.tokens[min(len(self.states) - 1, length) :], self.states[length + 1 :]
        for token in tokens:
            if not self.add(token):
                return

    def _settle_tree(self, parents: list[int], length: int) -> None:
        tokens, parents = self.tokens[:length], parents[:length]
        states = self.states[: length + 1]
        known = len(states) - 1
        place = {at: at for at in range(ROOT, known)}  # of each token that stays
        for at in range(known, len(tokens)):
            parent = place.get(parents[at])
            after = None if parent is None else _forked(states[parent + 1], tokens[at])
            if after is not None:
                place[at] = len(states) - 1
                states.append(after)
        del place[ROOT]
        if self.chances is not None:
            self.chances = [self.chances[at] for at in place]
        self.tokens, self.states = [tokens[at] for at in place], states
        self.parents = [ROOT if parents[at] == ROOT else place[parents[at]] for at in place]
        self._ways = None

    def arrange(self) -> None:
        """Put a tree that stays as it is in the order of its ways: after each token its first."""
        if self.parents is None:
            return
        order: list[int] = []
        open_ = [at for at, parent in enumerate(self.parents) if parent == ROOT][::-1]
        following: list[list[int]] = [[] for _ in self.tokens]
        for at, parent in enumerate(self.parents):
            if parent != ROOT:
                following[parent].append(at)
        while open_:
            order.append(open_.pop())
            open_ += following[order[-1]][::-1]
        place = {at: new for new, at in enumerate(order)} | {ROOT: ROOT}
        self.parents = [place[self.parents[at]] for at in order]
        self._ways = None
        self.tokens = [self.tokens[at] for at in order]
        self.states = [self.states[0], *(self.states[at + 1] for at in order)]
        if self.chances is not None:
            self.chances = [self.chances[at] for at in order]

    @property
    def ways(self) -> list[list[int]]:
        """The places of the tokens on each way from the root to a leaf; not to be changed."""
        if self.parents is None:
            return ways(None, len(self.tokens))
        if self._ways is None:
            self._ways = ways(self.parents, len(self.tokens))
        return self._ways

    @property
    def is_expected(self) -> bool:
        """Whether it is what the sequence's caller has said will come."""
        return self.kind >= KIND

    @property
    def depth(self) -> int:
        """Tokens on the longest way."""
        return len(self) if self.parents is None else max(map(len, self.ways), default=0)

    def __len__(self) -> int:
        return len(self.tokens)


def ways(parents: Sequence[int] | None, count: int) -> list[list[int]]:
    """The places on each way from the root to a leaf of `count` guesses."""
    if parents is None:
        return [list(range(count))] if count else []
    found = []
    for leaf in sorted(set(range(count)) - set(parents)):
        way = [leaf]
        while parents[way[-1]] != ROOT:
            way.append(parents[way[-1]])
        found.append(way[::-1])
    return found


def followed(
    tokens: Sequence[int], parents: Sequence[int] | None, next_after: Callable[[int, int], int]
) -> list[int]:
    """The places of the guesses that came true, one after another.

    next_after: what came after the guess at some place, the root's too, and how many lie before.
    """
    if parents is None:
        parents = range(ROOT, len(tokens) - 1)
    following = {
        (parent, token): at for at, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    found: list[int] = []
    at = ROOT
    while (at := following.get((at, next_after(at, len(found))), ROOT)) != ROOT:
        found.append(at)
    return found


def _forked(state: SequenceSampling, token: int) -> SequenceSampling | None:
    try:
        return state.fork(token)
    except RequestError:  # a grammar forbids it
        return None


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence whose last token is the only one to be computed, and that wants a draft."""

    key: object  # the same one for the same sequence; compared by identity
    tokens: list[int]  # all of it so far, not to be changed
    sampling: SequenceSampling
    blocks: list[int]  # its own, with room for len(tokens) - 1 + limit tokens
    limit: int  # of tokens one after another in the draft, at least 1
    salt: Hashable = None  # what it brings forth may be seen by those of the same only
    expected: Prediction | None = None  # of its output, by whoever asked for it


def looked_up(wish: Wish, length: int, guess: Callable[[], Iterable[int]]) -> Draft:
    """A draft for a sequence whose last `length` tokens stood before: what its caller expects,
    where at least as many, and not none, came so; else `guess`.
    """
    draft, expected = Draft(wish.sampling), wish.expected
    followed_for = 0 if expected is None else expected.follow(wish.tokens)
    if expected is not None and followed_for and followed_for >= length:
        draft.kind = KIND + followed_for.bit_length()
        draft.extend(expected.guess(wish.limit))
    else:
        draft.kind = length.bit_length()
        draft.extend(guess())
    return draft


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has computed of a sequence, for those that guess by the target's states."""

    key: object
    tokens: list[int]  # all of it, what the step has brought included; not to be changed
    blocks: list[int]
    first: int  # the position of the first row
    rows: list[int]  # of the last step, for that position and those after it: none of wrong guesses


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


@runtime_checkable
class Learner(Proposer, Protocol):
    """Guesses by what others have brought forth."""

    def ended(self, key: object, tokens: list[int], num_prompt: int, salt: Hashable) -> None:
        """A sequence has ended, whether or not it was asked for; called before `forget`.

        tokens: all of it, the first `num_prompt` being the prompt's. salt: those of the same may
        see what it brought forth.
        """


@runtime_checkable
class StateReader(Proposer, Protocol):
    """Guesses by the states that the target has computed inside (`nn.KeptStates`)."""

    wants: int
    """Of how many steps it should have seen the states before it is asked, after some that it
    hasn't seen."""

    def saw(self, computed: Sequence[Computed]) -> None:
        """A step is over, whose states are still where they are kept. Drafts for some of these
        sequences may be wished for next.
        """

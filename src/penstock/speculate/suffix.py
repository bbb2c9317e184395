"""Suffix decoding: what mostly followed the last tokens, in this sequence and in past outputs.

Source: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975. Their suffix trees, one of past
outputs and one of each request, are replaced by hash chains, which look at the latest places only;
the guess is one path, not a tree.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.errors import ConfigError
from penstock.speculate.matches import MOST_PLACES, Runs
from penstock.speculate.proposer import Draft, Wish, looked_up

MIN_PROBABILITY: Final = 0.1
"""A guess ends where what is known gives the whole of it less."""

TOKENS_PER_MATCHED: Final = 1
"""How long a guess may be, for each token that matches: short matches are mostly chance."""

MIN_MATCH: Final = 1
"""Tokens of the shortest match: one already says more than nothing."""

PARTS: Final = 4
"""Of past outputs; the oldest part is forgotten when the newest is full."""

LEAST_TOKENS: Final = PARTS * (MIN_MATCH + 2)
"""Of past outputs: in each part a match, what follows it, and an end."""

_END: Final = -1  # of an output
_TOKEN: Final = (1 << 32) - 1

Branch = tuple[Sequence[int], int]
"""A text, and a place in it."""


class SuffixProposer:
    """Guesses by frequency: where the longest match is found, the tokens that mostly followed.

    Outputs are kept as their sequences end, and are seen only by those of the same salt.
    """

    name = "suffix"
    by_passes = False
    last_caught_up = 0

    def __init__(
        self,
        max_depth: int = 24,
        max_tokens: int = 1_000_000,
        max_outputs: int | None = None,
        factor: float = TOKENS_PER_MATCHED,
        least: float = MIN_PROBABILITY,
    ) -> None:
        """How many tokens are looked at, and how many of past outputs are kept; of how many
        outputs at most, None: of any number. factor: how long a guess may be, for each token that
        matches. least: a guess ends where what is known gives the whole of it less.
        """
        if max_tokens < LEAST_TOKENS:
            raise ConfigError(
                f"suffix_decoding_max_cached_tokens={max_tokens} keeps nothing to look at. Make it "
                f"at least {LEAST_TOKENS}, or take method='ngram'."
            )
        if factor * max_depth < 1:
            raise ConfigError(
                f"suffix_decoding_max_spec_factor={factor:g} of at most "
                f"suffix_decoding_max_tree_depth={max_depth} tokens that match is less than one "
                f"token: no guess would have any. Make the first at least {1 / max_depth:.3g}."
            )
        self._depth = max_depth
        self._factor, self._least = factor, least
        self._live: dict[object, _Live] = {}
        self.past = Past(max_depth, max_tokens, max_outputs)

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, of no tokens where its end never stood before."""
        drafts = []
        for wish in wishes:
            prompt = wish.sampling.num_prompt
            length, branches = self.match(wish.key, wish.tokens, prompt, wish.salt)
            guess = partial(self._guess, wish.tokens, length, branches, wish.limit)
            drafts.append(looked_up(wish, length, guess))
        return drafts

    @property
    def nbytes(self) -> int:
        """What past outputs and the indexes of sequences that haven't ended take."""
        return self.past.nbytes + sum(live.runs.nbytes for live in self._live.values())

    def guess(
        self, key: object, tokens: list[int], num_prompt: int, limit: int, salt: Hashable = None
    ) -> list[int]:
        """Up to `limit` tokens that may follow `tokens`, the sequence of that key."""
        return self._guess(tokens, *self.match(key, tokens, num_prompt, salt), limit)

    def _guess(
        self, tokens: list[int], length: int, branches: list[Branch], limit: int
    ) -> list[int]:
        limit = min(limit, int(self._factor * length))
        return likeliest(branches[:MOST_PLACES], tokens, limit, self._least)

    def match(
        self, key: object, tokens: list[int], num_prompt: int, salt: Hashable
    ) -> tuple[int, list[Branch]]:
        """How many of the last tokens stood before, and where; the sequence's own text first."""
        live = self._live.get(key)
        if live is None:
            runs = Runs(MIN_MATCH, self._depth, 2 * len(tokens))
            live = self._live[key] = _Live(tokens, runs, num_prompt, salt)
        live.tokens = tokens
        live.runs.read(tokens)
        tail, hashes = tokens[-self._depth :], live.runs.hashes
        length, places = live.runs.find(tokens, tail, hashes)
        branches: list[Branch] = [(tokens, place) for place in places]
        past_length, past_branches = self.past.find(tail, hashes, salt)
        if past_length > length:
            length, branches = past_length, past_branches
        elif past_length == length:
            branches += past_branches
        return length, branches

    def ended(self, key: object, tokens: list[int], num_prompt: int, salt: Hashable) -> None:
        """Keep what a sequence brought forth that never had a wish."""
        if key not in self._live:
            self.past.add(tokens[num_prompt:], salt)

    def forget(self, key: object) -> None:
        """The sequence of that key has ended; what it brought forth is kept."""
        live = self._live.pop(key, None)
        if live is not None:
            self.past.add(live.tokens[live.num_prompt :], live.salt)


def likeliest(
    branches: list[Branch], own: list[int], limit: int, least: float = MIN_PROBABILITY
) -> list[int]:
    """Up to `limit` tokens, each the one that most branches go on with that went on so far.

    Of equally frequent ones the first branch's. `own` is the text whose end is to be continued:
    a branch that reaches it goes on with what was guessed so far.
    """
    guess: list[int] = []
    probability = 1.0
    while len(guess) < limit and branches:
        if len(branches) == 1:
            text, place = branches[0]
            while len(guess) < limit and (token := _token(text, place, own, guess)) != _END:
                guess.append(token)
                place += 1
            break
        following = [_token(text, place, own, guess) for text, place in branches]
        token, count = Counter(following).most_common(1)[0]
        probability *= count / len(branches)
        if token == _END or probability < least:
            break
        guess.append(token)
        branches = [
            (text, place + 1)
            for (text, place), one in zip(branches, following, strict=True)
            if one == token
        ]
    return guess


def _token(text: Sequence[int], place: int, own: list[int], guess: list[int]) -> int:
    if text is not own:
        token = text[place]
        return token if token == _END else token & _TOKEN
    return text[place] if place < len(text) else guess[place - len(text)]


@dataclass(slots=True)
class _Live:
    """A sequence that hasn't ended."""

    tokens: list[int]
    runs: Runs
    num_prompt: int
    salt: Hashable


class Past:
    """Outputs that have ended; whoever looks for a match sees those of one salt.

    An entry of the text is a token and, above its 32 bits, the salt's number, so that no other
    salt's match: neither tokens nor hashes. A token takes 8 bytes of text and at most 12 in each of
    the tables of 1, 2, 4, … tokens. A full part takes 49 bytes a token, with a depth of 24.
    """

    def __init__(self, depth: int, max_tokens: int, max_outputs: int | None = None) -> None:
        self._depth, self._size = depth, max_tokens // PARTS
        self._most_parts, self._outputs = PARTS, max_tokens
        if max_outputs is not None:
            self._most_parts = min(PARTS, max_outputs)
            self._outputs = max_outputs // max(self._most_parts, 1)
        self._parts: list[_Part] = []  # the newest first

    @property
    def num_tokens(self) -> int:
        """How many are kept, and one more for each output's end."""
        return sum(len(part.text) for part in self._parts)

    @property
    def num_outputs(self) -> int:
        """How many are kept."""
        return sum(part.outputs for part in self._parts)

    @property
    def nbytes(self) -> int:
        """What all of it takes, without the salts."""
        return sum(part.text.itemsize * len(part.text) + part.runs.nbytes for part in self._parts)

    def add(self, output: list[int], salt: Hashable) -> None:
        """Keep an output, or as much of its end as fits."""
        output = output[-(self._size - 1) :]  # with room for its end
        if len(output) < MIN_MATCH + 1 or not self._most_parts:
            return  # nothing follows a match in it; or nothing is to be kept
        newest = self._parts[0] if self._parts else None
        if (
            newest is None
            or len(newest.text) + len(output) >= self._size
            or newest.outputs == self._outputs
        ):
            self._parts.insert(0, _Part(array("q"), Runs(MIN_MATCH, self._depth, self._size), {}))
            del self._parts[self._most_parts :]
        part = self._parts[0]
        part.outputs += 1
        base = part.salts.setdefault(salt, len(part.salts)) << 32
        part.runs.begin(len(part.text))
        part.text.extend([base | token for token in output])
        part.runs.read(part.text)
        part.text.append(_END)

    def find(self, tail: list[int], hashes: list[int], salt: Hashable) -> tuple[int, list[Branch]]:
        """Runs.find, in all that is kept of that salt, the newest first."""
        best = 0
        found: list[Branch] = []
        for part in self._parts:
            number = part.salts.get(salt)
            if number is None:
                continue
            base = number << 32
            salted = array("q", [base | token for token in tail])
            length, places = part.runs.find(part.text, salted, part.runs.salted(hashes, base))
            if length > best:
                best, found = length, []
            if length == best:
                found += [(part.text, place) for place in places]
        return best, found


@dataclass(slots=True)
class _Part:
    """Outputs one after the other, each with its end."""

    text: array[int]
    runs: Runs
    salts: dict[Hashable, int]  # the numbers of those who are in it
    outputs: int = 0

"""Token healing: the end of a prompt is chosen anew, together with what follows it.

A prompt that ends within a word, a number or a character is cut into tokens there that hardly ever
stood before what comes next: "http:" ends in ":", from which no text of the training went on with
"//", since "://" is a token of its own. So the last tokens are taken back, and the first new ones
must begin with the bytes that were theirs, whatever their boundaries.
Source: Lundberg & Ribeiro 2023, The Art of Prompt Design: Prompt Boundaries and Token Healing.

Which tokens are taken back: those that some continuation may change. A place is open where the
text behind it is the beginning of a longer piece: one token may run from there across the prompt's
end. For each open place it is known what stands before it: the tokens of the text up to there.
Tokens on which all these readings agree are kept. (Of one that ends with a token, the reading is
the prompt's own: byte pair encoding cuts a text up to one of its boundaries as in the whole.)
An open place may lie within a token: in "P" + "ree" there is one before the last "e", from which
"Pre" + "emption" goes on; so "P" isn't kept.

All of it is about bytes, so a prompt of token ids that ends within a character heals too.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, RequestError
from penstock.sampling.constraint import Bits, num_words

Ids = npt.NDArray[np.int32]


class PieceIndex:
    """A vocabulary's pieces in the order of their bytes; made once, shared by all sequences."""

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        """pieces: the bytes of token i, empty where it is special, a gap, or not in the model.

        vocab_size: the width of the masks; tokens behind the last piece have none.
        """
        if len(pieces) > vocab_size:
            raise ConfigError(
                f"There are {len(pieces)} pieces for a vocabulary of {vocab_size} tokens. "
                "Use the tokenizer that the model came with."
            )
        self._pieces = pieces
        order = sorted((i for i, piece in enumerate(pieces) if piece), key=pieces.__getitem__)
        self._sorted = [pieces[i] for i in order]
        self._ids: Ids = np.array(order, dtype=np.int32)
        self.vocab_size = vocab_size
        self.longest = max(map(len, self._sorted), default=0)  # bytes
        flags = np.arange(len(self._no_flags())) < vocab_size
        self.everything = _packed(flags)

    def piece(self, token_id: int) -> bytes:
        """The bytes of an ordinary token; empty for any other."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def is_beginning(self, text: bytes) -> bool:
        """Whether some piece begins with the text and goes on."""
        at = bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def beginning_with(self, text: bytes) -> range:
        """The places, in the order of bytes, of the pieces that begin with the text."""
        size = len(text)
        low = bisect_left(self._sorted, text)
        return range(low, bisect_right(self._sorted, text, low, key=lambda piece: piece[:size]))

    def within(self, text: bytes) -> Iterator[tuple[int, range]]:
        """The places of the pieces that the text begins with and goes on from, by their length."""
        low = 0
        for size in range(1, min(len(text) - 1, self.longest) + 1):
            start = text[:size]
            low = bisect_left(self._sorted, start, low)
            if low == len(self._sorted) or not self._sorted[low].startswith(start):
                return
            high = bisect_right(self._sorted, start, low)
            if low < high:
                yield size, range(low, high)

    def token_at(self, place: int) -> int:
        """The token whose piece is there in the order of bytes."""
        return int(self._ids[place])

    def place_of(self, token_id: int) -> int | None:
        """Where a token's piece is in the order of bytes; None for one that isn't ordinary."""
        piece = self.piece(token_id)
        if not piece:
            return None
        low = bisect_left(self._sorted, piece)
        same = range(low, bisect_right(self._sorted, piece, low))
        return next(place for place in same if self._ids[place] == token_id)

    def bits(self, places: Sequence[range]) -> Bits:
        """A mask of the tokens whose pieces are at these places."""
        flags = self._no_flags()
        for some in places:
            flags[self._ids[some.start : some.stop]] = True
        return _packed(flags)

    def _no_flags(self) -> npt.NDArray[np.bool_]:
        return np.zeros(32 * num_words(self.vocab_size), dtype=np.bool_)


def _packed(flags: npt.NDArray[np.bool_]) -> Bits:
    """One bit each, the lowest first."""
    return np.packbits(flags, bitorder="little").view(np.int32)


Encode = Callable[[bytes], Sequence[int] | None]
"""The tokens of a text that stands within a longer one; None for bytes that aren't such a text."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_WINDOW = range(16, 24)
"""Tokens before the open ones that are read again with them: one of these numbers may be right."""


@dataclass(frozen=True, slots=True)
class Healed:
    """A prompt whose end is to be chosen anew."""

    kept: list[int]
    prefix: bytes  # of the tokens that were taken back; empty where none was


def heal(prompt: Sequence[int], index: PieceIndex, encode: Encode) -> Healed:
    """Take back the tokens at the end of a prompt that what follows may change.

    index: of all pieces that the tokenizer makes. No open place is further back than the longest
    piece. A special token ends the search: nothing joins it with text. The first token always
    stays, since without a token before it nothing can be chosen: a prompt of one token, of a model
    without BOS, is left as it is.
    """
    pieces = [index.piece(token) for token in prompt[-(index.longest + _WINDOW.stop) :]]
    ordinary = next((n for n, piece in enumerate(reversed(pieces)) if not piece), len(pieces))
    most = min(ordinary, len(prompt) - 1)  # tokens that may be taken back
    pieces = pieces[len(pieces) - most :]
    text = b"".join(pieces)
    ends = np.cumsum([0, *map(len, reversed(pieces))]).tolist()  # bytes behind each boundary
    places = _open_places(text, index)
    if not places:
        return Healed(list(prompt), b"")
    back = bisect_left(ends, places[-1])
    within = [size for size in places if size not in ends]
    if within:
        back = max(back, _changed(prompt[len(prompt) - most :], text, ends, within, back, encode))
    return Healed(list(prompt[: len(prompt) - back]), text[len(text) - ends[back] :])


def _open_places(text: bytes, index: PieceIndex) -> list[int]:
    """How many bytes are behind each open place at the end of a text.

    Where the text ends within a character, a token may end there too: nobody has cut the half of a
    character as the tokenizer cuts the whole.
    """
    decoder = _utf8_decoder("replace")
    decoder.decode(text)
    places = set()
    for cut in range(max(len(decoder.getstate()[0]), 1)):
        before = text[: len(text) - cut]
        for size in range(1, min(len(before), index.longest) + 1):
            begun = before[len(before) - size :]
            if index.is_beginning(begun) or (cut and index.beginning_with(begun)):
                places.add(size + cut)
    return sorted(places)


def _changed(
    ids: Sequence[int], text: bytes, ends: list[int], places: list[int], back: int, encode: Encode
) -> int:
    """How many of the tokens at the end the readings up to these places don't agree on.

    Only the end is read again, from a token on from which it is read as it was as a part of the
    whole; where there is none (the prompt isn't what the tokenizer makes) no token is changed.
    """
    for more in _WINDOW:
        count = min(back + more, len(ids))
        part, own = text[len(text) - ends[count] :], list(ids[len(ids) - count :])
        whole = next(n for n in range(count + 1) if n == count or _is_text(part, ends[n]))
        if list(encode(part[: len(part) - ends[whole]]) or ()) == own[: count - whole]:
            break
    else:
        return 0
    kept = count
    for place in places:
        reading = encode(part[:-place])
        if reading is not None:
            pairs = zip(own, reading, strict=False)
            kept = min(kept, next((n for n, (a, b) in enumerate(pairs) if a != b), len(reading)))
    return count - kept


def _is_text(data: bytes, behind: int) -> bool:
    """Whether the bytes, but for the last `behind`, end with a whole character."""
    try:
        data[: len(data) - behind].decode()
    except UnicodeDecodeError:
        return False
    return True


class _Plan:
    """Which tokens may come at each byte of a prefix: none from which it couldn't be completed."""

    def __init__(self, prefix: bytes, index: PieceIndex) -> None:
        self.prefix, self.index = prefix, index
        self.places: list[list[range]] = [[] for _ in prefix]
        for at in reversed(range(len(prefix))):
            rest, found = prefix[at:], self.places[at]
            found += [some for size, some in index.within(rest) if self.places[at + size]]
            longer = index.beginning_with(rest)
            if longer:
                found.append(longer)
        if prefix and not self.places[0]:
            raise RequestError(
                f"The prompt ends in {prefix[:40]!r}, {len(prefix)} bytes that no tokens of this "
                "model make. Leave out token_healing."
            )


class PrefixConstraint:
    """The first tokens must make a prefix and may go beyond it; then everything may come."""

    __slots__ = ("_after", "_path", "_plan")

    def __init__(self, prefix: bytes, index: PieceIndex) -> None:
        """index: of the pieces that may be chosen. Raises RequestError where none make it."""
        self._plan = _Plan(prefix, index)
        self._path = [0]  # bytes of the prefix that are there, after each token until it is over
        self._after = 0  # tokens since

    @property
    def is_over(self) -> bool:
        """Whether the prefix is complete, so that nothing is limited any more."""
        return self._path[-1] >= len(self._plan.prefix)

    def fill(self, bits: Bits) -> None:
        """Write which tokens may come next: those that begin with the rest, or that it begins with.

        No special token may come before the prefix is complete.
        """
        index = self._plan.index
        bits[:] = (
            index.everything if self.is_over else index.bits(self._plan.places[self._path[-1]])
        )

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token. Raises RequestError for one that mustn't come."""
        if self.is_over:
            self._after += 1
            return
        plan, at = self._plan, self._path[-1]
        place = plan.index.place_of(token_id)
        if place is None or not any(place in some for some in plan.places[at]):
            rest = plan.prefix[at:]
            raise RequestError(
                f"Token id {token_id} ({plan.index.piece(token_id)!r}) doesn't go on with the "
                f"{len(rest)} bytes {rest[:40]!r} that the prompt ends in."
            )
        self._path.append(at + len(plan.index.piece(token_id)))

    def forced(self) -> list[int]:
        """Tokens of which each is the only one that may come, in order; none is accepted yet."""
        plan, at = self._plan, self._path[-1]
        found: list[int] = []
        while at < len(plan.prefix) and sum(map(len, plan.places[at])) == 1:
            found.append(plan.index.token_at(next(r.start for r in plan.places[at] if r)))
            at += len(plan.index.piece(found[-1]))
        return found

    @property
    def is_complete(self) -> bool:
        """Never: where the text ends is left to the model."""
        return False

    @property
    def may_end(self) -> bool:
        """Whether an end token may come."""
        return self.is_over

    def fork(self) -> PrefixConstraint:
        """The same state for another sequence with the same tokens."""
        other = PrefixConstraint.__new__(PrefixConstraint)
        other._plan, other._path, other._after = self._plan, list(self._path), self._after
        return other

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        taken = len(self._path) - 1 + self._after
        if not 0 <= count <= taken:
            raise RequestError(f"{count} tokens can't be taken back of {taken}.")
        after = min(count, self._after)
        self._after -= after
        del self._path[len(self._path) - (count - after) :]

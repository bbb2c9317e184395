"""Where one sequence is in its grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Optional

import numpy as np

from penstock.errors import PenstockError, RequestError
from penstock.grammar.matcher import first_line
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.work import Work
from penstock.sampling.constraint import Bits, num_words

if TYPE_CHECKING:
    import llguidance

_REASONS = {
    "ParserTooComplex": "too many ways to read the text remain open at once",
    "LexerTooComplex": "a pattern in it takes too many states",
    "MaxTokensTotal": "the most tokens that it allows have been written",
    "MaxTokensParser": "the most tokens that it allows have been written",
}


_OUT_OF_STATES: Final = "too many states"
"""In the library's words."""

RENEWED_EVERY: Final = 16
"""Tokens at least between two lexers that are made for one text."""

_Run = tuple[Sequence[int], int]
"""Forced tokens, and how many of them have come."""

_NOT_ASKED: Final[_Run] = (), 0

_Told = Optional[tuple["_Told", int, _Run]]  # noqa: UP045  it names itself
"""The tokens of a text, the last first, each with the run before it; what is shared with copies
isn't copied."""


class GrammarState:
    """A `Constraint`: llguidance's matcher for a compiled grammar, over a model's vocabulary.

    A matcher shares its lexer with all its copies, and a lexer keeps a bounded number of states:
    those that other texts and wrong guesses have come to are among them. Where it has no room for
    another, none of the copies can go on to where none has been. Then the text's own tokens are
    told to a matcher that is compiled anew.

    Text that a grammar forces is one run of tokens, as the tokenizer splits the whole of it. Asked
    in the middle, the library would split what is left anew, and in other ways. So the run is kept
    until it is used up: with jumps, step by step and in drafts the tokens are the same.
    """

    __slots__ = (
        "_ended",
        "_fresh",
        "_matcher",
        "_renewed_at",
        "_run",
        "_tokens",
        "_told",
        "_vocabulary",
        "_work"
    )  # fmt: skip

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        *,
        fresh: Callable[[], GrammarState] | None = None,
    ) -> None:
        """fresh: a state at the beginning of the same form, with a lexer that isn't used up."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ended = False  # by an end token, which the matcher isn't told: it wouldn't count it
        self._fresh = fresh
        self._run = _NOT_ASKED
        self._told: _Told = None
        self._tokens = 0  # that were told
        self._renewed_at: int | None = None
        self._work = Work()  # of this and what is forked from it

    def fill(self, bits: Bits) -> None:
        """Write which tokens may come next. Raises RequestError where a limit is reached."""
        vocabulary = self._vocabulary
        if bits.dtype != np.int32 or len(bits) != vocabulary.words or not bits.flags.c_contiguous:
            raise ValueError(
                f"a mask of {vocabulary.size} tokens is {vocabulary.words} words of int32 in a row,"
                f" not {bits.shape} of {bits.dtype}"
            )
        if self._ended:
            bits[:] = 0
            return
        self._work.check()
        if (token := self._forced()) is not None:
            bits[:] = 0
            bits[token // 32] = np.uint32(1 << token % 32).view(np.int32)
            return
        self._mask(bits)
        if _OUT_OF_STATES in self.failure and self._renew():
            self._mask(bits)
        self._check()

    def _mask(self, bits: Bits) -> None:
        vocabulary = self._vocabulary
        if vocabulary.eos_token_ids or vocabulary.size % 32:
            with self._work.counted():
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not vocabulary.eos_token_ids:  # the end token that the library has in their place
                bits[-1] &= (1 << vocabulary.size % 32) - 1
        else:
            wider = np.zeros(num_words(vocabulary.size + 1), dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(wider.ctypes.data, wider.nbytes)
            bits[:] = wider[: len(bits)]

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token. Raises RequestError for one that mustn't come."""
        if token_id in self._vocabulary.eos_token_ids and self.may_end:
            self._ended = True
            return
        forced, run = self._forced(), self._run
        follows = not self._ended and self._follows(token_id)
        if not (follows or self._ended) and self._lacks_states(token_id):
            if not self._renew():
                raise _broken_off(_REASONS["LexerTooComplex"], self.failure or _OUT_OF_STATES)
            follows = self._follows(token_id)
        self._work.tokens += 1
        if not follows:
            self._check()
            raise RequestError(
                f"Token id {token_id}{self._vocabulary.tokenizer.quoted(token_id)} doesn't go on "
                "with the text as its grammar, regex or schema demands."
            )
        self._told, self._tokens = (self._told, token_id, run), self._tokens + 1
        self._run = _NOT_ASKED
        if token_id == forced and run[1] + 1 < len(run[0]):
            self._run = run[0], run[1] + 1
        self._check()

    def _follows(self, token_id: int) -> bool:
        with self._work.counted():
            return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def forced(self) -> list[int]:
        """Tokens of which each is the only one that may come, in order."""
        if self._forced() is None:
            return []
        tokens, come = self._run
        return list(tokens[come:])

    def _forced(self) -> int | None:
        """The next of them."""
        if self._ended:
            return None
        if self._run is _NOT_ASKED:
            with self._work.counted():
                found = self._matcher.compute_ff_tokens()
            if _OUT_OF_STATES in self.failure and self._renew():
                with self._work.counted():
                    found = self._matcher.compute_ff_tokens()
            self._run = found, 0
        tokens, come = self._run
        return tokens[come] if tokens else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come but an end token."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def is_over(self) -> bool:
        """Never: what is complete must end."""
        return False

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        return not self._ended and self._matcher.is_accepting()

    def fork(self) -> GrammarState:
        """The same state for another sequence with the same tokens."""
        twin = object.__new__(GrammarState)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._matcher = self._matcher.deep_copy()
        return twin

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise ValueError(f"{count} tokens can't be taken back: {self._matcher.get_error()}")
        for _ in range(count):
            assert self._told is not None  # or the matcher would have refused
            self._told, _, self._run = self._told
        self._tokens -= count

    # ── a lexer without room ─────────────────────────────────────────────────────────────────

    def _lacks_states(self, token_id: int) -> bool:
        """Whether a token was refused for want of a state of the lexer, which needn't say so.

        Where it doesn't, the mask still does, or knows that the token may come.
        """
        if not self._matcher.is_error() and 0 <= token_id < self._vocabulary.size:
            bits = np.zeros(self._vocabulary.words, dtype=np.int32)
            self._mask(bits)
            if bits[token_id // 32] >> token_id % 32 & 1:
                return True
        return _OUT_OF_STATES in self.failure

    def _renew(self) -> bool:
        """Go on with a matcher of its own lexer that has been told the same tokens."""
        since = None if self._renewed_at is None else self._tokens - self._renewed_at
        if self._fresh is None or (since is not None and since < RENEWED_EVERY):
            return False
        start = time.perf_counter()
        try:
            found = self._fresh()
        except PenstockError:  # it takes too long now; the reason is that of the old one
            return False
        tokens, told = list[int](), self._told
        while told is not None:
            told, token, _ = told
            tokens.append(token)
        follows = found._matcher.try_consume_tokens(tokens[::-1]) == len(tokens)
        self._work.seconds += time.perf_counter() - start
        if follows:
            self._matcher, self._fresh = found._matcher, found._fresh
            self._renewed_at = self._tokens
        return follows

    @property
    def failure(self) -> str:
        """Why it can't go on, in the library's words; empty while it can."""
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def _check(self) -> None:
        if not (failure := self.failure):
            return
        reason = _REASONS.get(self._matcher.stop_reason(), "no token of the model can go on here")
        if "too many" in failure:  # expressions of one step, or states of all copies together
            reason = _REASONS["LexerTooComplex"]
        raise _broken_off(reason, failure)


def _broken_off(reason: str, failure: str) -> RequestError:
    return RequestError(
        f"The text can't be held to its structure any further: {reason} (llguidance: {failure}). "
        "Make the grammar or schema simpler, or bound its repetitions."
    )

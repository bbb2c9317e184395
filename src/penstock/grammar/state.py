"""Where one sequence is in its grammar."""

from __future__ import annotations

from collections.abc import Callable

import llguidance
import numpy as np

from penstock.errors import RequestError
from penstock.grammar.matcher import first_line
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.work import Work
from penstock.sampling.constraint import Bits, num_words

_REASONS = {
    "ParserTooComplex": "too many ways to read the text remain open at once",
    "LexerTooComplex": "a pattern in it takes too many states",
    "MaxTokensTotal": "the most tokens that it allows have been written",
    "MaxTokensParser": "the most tokens that it allows have been written",
}


class GrammarState:
    """A `Constraint`: llguidance's matcher for a compiled grammar, over a model's vocabulary."""

    __slots__ = ("_ended", "_matcher", "_used_up", "_vocabulary", "_work")

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        *,
        ended: bool = False,
        used_up: Callable[[], None] | None = None,
        work: Work | None = None,
    ) -> None:
        """used_up: called where the matcher has no room for another state of its lexer, which it
        shares with all its copies: none of them can go on to where none has been. work: what those
        it was forked from have taken.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ended = ended  # by an end token, which the matcher isn't told: it wouldn't count it
        self._used_up = used_up
        self._work = Work() if work is None else work

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
        if vocabulary.eos_token_ids or vocabulary.size % 32:
            with self._work.counted():
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not vocabulary.eos_token_ids:  # the end token that the library has in their place
                bits[-1] &= (1 << vocabulary.size % 32) - 1
        else:
            wider = np.zeros(num_words(vocabulary.size + 1), dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(wider.ctypes.data, wider.nbytes)
            bits[:] = wider[: len(bits)]
        self._check()

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token. Raises RequestError for one that mustn't come."""
        if token_id in self._vocabulary.eos_token_ids and self.may_end:
            self._ended = True
            return
        with self._work.counted():
            follows = not self._ended and self._matcher.try_consume_tokens([token_id]) == 1
        self._work.tokens += 1
        if not follows:
            self._check()
            raise RequestError(
                f"Token id {token_id}{self._vocabulary.tokenizer.quoted(token_id)} doesn't go on "
                "with the text as its grammar, regex or schema demands."
            )
        self._check()

    def forced(self) -> list[int]:
        """Tokens of which each is the only one that may come, in order."""
        if self._ended:
            return []
        with self._work.counted():
            return self._matcher.compute_ff_tokens()

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
        matcher, work = self._matcher.deep_copy(), self._work
        return GrammarState(
            matcher, self._vocabulary, ended=self._ended, used_up=self._used_up, work=work
        )

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise ValueError(f"{count} tokens can't be taken back: {self._matcher.get_error()}")

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
            if self._used_up is not None:
                self._used_up()
        raise RequestError(
            f"The text can't be held to its structure any further: {reason} (llguidance: {failure})"
            ". Make the grammar or schema simpler, or bound its repetitions."
        )

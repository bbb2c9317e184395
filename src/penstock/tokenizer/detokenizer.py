"""Text for a stream of tokens: whole characters only, and nothing of a stop string.

Per token: one dictionary look-up for its bytes and one incremental UTF-8 decoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import InvalidSamplingError, TokenizerError
from penstock.tokenizer.stops import StopFinder

if TYPE_CHECKING:
    from penstock.tokenizer.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns one request's output tokens into text as they come.

    The concatenated results of `append` and `finish` are the text that `Tokenizer.decode` gives
    the output as a continuation of the prompt, cut at the first stop string.

    Where the end of the prompt was chosen anew, output begins with bytes of the prompt: the first
    `skip_bytes` of it are no text, and no stop string is looked for in them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_bytes: int = 0,
    ) -> None:
        """prompt_ids: the whole prompt, also of what was chosen anew."""
        _check_stops(stop)
        self._pieces = tokenizer.piece_table(skip_special_tokens=skip_special_tokens)
        self._decoder = _utf8_decoder("replace")
        self._finder = StopFinder(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        # A stop string that will be shown anyway needs no holding back.
        self._holds_back = not include_stop_str_in_output
        self._pending = ""
        self._released: list[str] = []
        self._released_length = 0
        self._finished = False
        self.stop_reason: str | None = None
        self._tail, empty = self._prompt_tail(prompt_ids)
        self._strip_space = empty and tokenizer.strip_leading_space
        # All of these only matter until the first byte of text.
        self._skip = skip_bytes
        self._at_start = True

    def look_for(self, stop: Sequence[str]) -> None:
        """Look for these stop strings in what comes from now on; there were none before."""
        _check_stops(stop)
        self._finder = StopFinder(stop)

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Take new output tokens; the text that can be shown now."""
        if self._finished:
            if self.stop_reason is not None:
                return ""
            raise TokenizerError(
                f"append() was called with {len(token_ids)} tokens after finish(). "
                f"Use a new IncrementalDetokenizer for each output."
            )
        pieces = self._pieces
        if len(token_ids) == 1:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[token_id] for token_id in token_ids])
        if self._at_start:
            data = self._first_bytes(data)
        new = self._decoder.decode(data)
        if self._finder is None:
            if new:
                self._released.append(new)
            return new
        return self._release(new)

    def finish(self) -> str:
        """End of the output: what was held back, with U+FFFD for half a character."""
        if self._finished:
            return ""
        new = self._decoder.decode(b"", final=True)
        text = self._release(new)
        if self._pending:
            self._released.append(self._pending)
            text += self._pending
            self._pending = ""
        self._finished = True
        return text

    def _release(self, new: str) -> str:
        """Search the new text for stop strings and release what can't be part of one."""
        if self._finder is not None:
            match = self._finder.feed(new)
            if match is not None:
                self.stop_reason = match.stop
                self._finished = True
                end = match.end if self._include_stop else match.start
                new = (self._pending + new)[: end - self._released_length]
                self._pending = ""
            elif self._holds_back:
                new = self._pending + new
                shown = len(new) - self._finder.held
                new, self._pending = new[:shown], new[shown:]
        if new:
            self._released.append(new)
            self._released_length += len(new)
        return new

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> tuple[bytes, bool]:
        """The half character that the prompt ends in, and whether the prompt shows nothing."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._pieces[token_id] + tail
            if len(tail) >= 4:
                break
        decoder = _utf8_decoder("replace")
        decoder.decode(tail)
        return decoder.getstate()[0], not tail

    def _first_bytes(self, data: bytes) -> bytes:
        """Settle what depends on the prompt, when the first output bytes arrive."""
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if not data:
            return data
        self._at_start = False
        if self._strip_space:
            data = data.removeprefix(b" ")
        # If output goes on with the prompt's half character, the character is output. If it
        # doesn't, the character's U+FFFD belongs to the prompt.
        if self._tail:
            joined = _utf8_decoder("replace").decode(self._tail + data[:1])
            if not joined.startswith("\ufffd"):
                data = self._tail + data
        return data


def _check_stops(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise InvalidSamplingError(
            f"stop is the string {stop[:40]!r}, which would be read as {len(stop)} one-character "
            f"stop strings. Pass [{stop[:40]!r}]."
        )
    for index, text in enumerate(stop):
        if not isinstance(text, str) or not text:
            raise InvalidSamplingError(
                f"stop[{index}] of {len(stop)} is {text!r}, but every stop string must be text "
                f"with at least one character. Remove it."
            )

"""A model's tokens as llguidance sees them: bytes, of which masks and forced tokens are made.

Special tokens carry a mark there and never stand for text: a grammar's text "<|im_end|>" is
written in ordinary tokens. A token that the model lacks (a gap, a row that pads the head, one that
a reduced vocabulary left out) has no bytes, and so is in no mask.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.errors import InvalidPromptError, TokenizerError
from penstock.sampling.constraint import num_words
from penstock.tokenizer import Tokenizer, VocabMap

if TYPE_CHECKING:
    import llguidance

_MARK = b"\xff"
"""Begins a special token: a byte that no UTF-8 text holds."""

_NO_TOKENS = "the model has no tokens for the text"

_BEFORE = ("", "\n", ".", "a")
"""What may stand before a text while it is encoded, so that no word marker is put before it."""


class Writer:
    """Text in tokens whose bytes are exactly that text, as llguidance asks for it.

    A tokenizer alone doesn't keep that promise: SentencePiece puts a space before a text, some
    normalise what they read, and all turn "<|im_end|>" into the token that steers the model.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes], special: Iterable[int]):
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._special = frozenset(special)
        names = {tokenizer.id_to_token(i) or "" for i in self._special}
        names = {name for name in names if len(name) > 1}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        self._names = re.compile("|".join(map(re.escape, longest_first))) if names else None
        self._by_bytes = {
            piece: i for i, piece in enumerate(pieces) if piece and i not in self._special
        }
        self._longest = max(map(len, self._by_bytes), default=0)

    def write(self, text: str) -> list[int]:
        """The tokens. Raises TokenizerError where the vocabulary lacks some of it."""
        found: list[int] = []
        for part in self._parts(text):
            found += self._exact(part)
        if self._bytes(found) != text.encode():
            # Less than all would pass for it, and the next mask would be one of another place.
            raise TokenizerError(f"{_NO_TOKENS} {text!r:.60}")
        return found

    def _parts(self, text: str) -> list[str]:
        """The text, cut within each special token's name, so that none is recognised."""
        if self._names is None:
            return [text]
        parts, start = [], 0
        while match := self._names.search(text, start):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [*parts, text[start:]]

    def _exact(self, text: str) -> list[int]:
        wanted = text.encode()
        for before in _BEFORE:
            tokens = self._encode(before + text)
            tokens = self._after(tokens, before.encode()) if before else tokens
            if tokens is not None and self._bytes(tokens) == wanted:
                return tokens
        return self._greedy(wanted)

    def _encode(self, text: str) -> list[int] | None:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except InvalidPromptError:  # a reduced vocabulary has no tokens for it
            return None

    def _after(self, tokens: list[int] | None, before: bytes) -> list[int] | None:
        """The tokens after those of `before`, which a space may precede."""
        length = 0
        for count, token in enumerate(tokens or (), 1):
            length += len(self._piece(token))
            if self._bytes(tokens[:count] if tokens else ()).lstrip(b" ") == before:
                return tokens[count:] if tokens else None
            if length > len(before) + 1:
                break
        return None

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place."""
        found, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._by_bytes.get(data[at : at + length])
                if token is not None:
                    found.append(token)
                    at += length
                    break
            else:
                break
        return found

    def _bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self._piece, tokens))

    def _piece(self, token: int) -> bytes:
        """A token's text; a special one has none."""
        if token in self._special or not 0 <= token < len(self._pieces):
            return b""
        return self._pieces[token]


class _Wrapper:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, pieces: list[bytes], special: list[int], eos: int, writer: Writer) -> None:
        self.tokens = pieces
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = None
        self._writer = writer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._writer.write(text if isinstance(text, str) else bytes(text).decode())


class Vocabulary:
    """The tokens of a model, and how wide its masks are."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        vocab_map: VocabMap | None = None,
    ) -> None:
        """vocab_size: of the logits; eos_token_ids: all that end a text of this model."""
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.words = num_words(vocab_size)
        self.vocab_map = tokenizer.vocab_map if vocab_map is None else vocab_map
        self.eos_token_ids = tuple(
            sorted({int(i) for i in eos_token_ids if 0 <= int(i) < vocab_size and self.has(int(i))})
        )
        self.special_ids = tokenizer.special_ids | set(self.eos_token_ids)
        self._made: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def has(self, token: int) -> bool:
        """Whether the model can choose this token."""
        kept = self.vocab_map is None or self.vocab_map.has(token)
        return 0 <= token < self.size and kept

    @property
    def tokens(self) -> llguidance.LLTokenizer:
        """The library's own form, made when it is first asked for (0.1 to 1 s)."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> llguidance.LLTokenizer:
        import llguidance

        table: Mapping[int, bytes] = self.tokenizer.piece_table(skip_special_tokens=False)
        pieces = [table[i] if self.has(i) else b"" for i in range(self.size)]
        special = [i for i in sorted(self.special_ids) if self.has(i)]
        writer = Writer(self.tokenizer, tuple(pieces), special)
        for i in special:
            pieces[i] = _MARK + pieces[i]
        # The library wants an end token. A model without one gets one outside of its masks.
        eos = list(self.eos_token_ids) or [self.size]
        if not self.eos_token_ids:
            pieces.append(_MARK + b"end")
            special.append(self.size)
        wrapper = _Wrapper(pieces, special, eos[0], writer)
        return llguidance.LLTokenizer(wrapper, n_vocab=len(pieces), eos_token=eos)  # type: ignore[arg-type]

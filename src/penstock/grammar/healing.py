"""Token healing with a model's tokenizer: what `penstock.sampling.healing` needs to know of it.

It lies here because `sampling` and `tokenizer` don't know each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from penstock.sampling.healing import Healed, PieceIndex, PrefixConstraint, heal
from penstock.tokenizer import Tokenizer


class Healer:
    """Heals prompts of one model. Its index is made with the first: half a second at 152k tokens.

    Safe to use from several threads; at worst the index is made twice.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the width of logits, padding rows and all; of a reduced model the whole."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def prepare(self) -> None:
        """Make the indexes now."""
        self.constraint(b"")

    def heal(self, prompt: Sequence[int]) -> Healed:
        """Take back the end of a prompt. A prefix of no bytes says that nothing is to be healed."""
        return heal(prompt, self._made, self._encode)

    def constraint(self, prefix: bytes) -> PrefixConstraint:
        """What holds one sequence to the prefix; further samples take a fork of it."""
        return PrefixConstraint(prefix, self._chosen)

    @cached_property
    def _made(self) -> PieceIndex:
        """The pieces that the tokenizer makes, before it writes some of them in others."""
        table = self._tokenizer.piece_table(skip_special_tokens=True)
        pieces = [table[token] for token in range(self._tokenizer.vocab_size)]
        return PieceIndex(pieces, self._vocab_size)

    @cached_property
    def _chosen(self) -> PieceIndex:
        """The pieces that the model can choose."""
        whole, kept = self._made, self._tokenizer.vocab_map
        if kept is None:
            return whole
        size = self._tokenizer.vocab_size
        pieces = [whole.piece(token) if kept.has(token) else b"" for token in range(size)]
        return PieceIndex(pieces, self._vocab_size)

    def _encode(self, data: bytes) -> Sequence[int] | None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        if self._tokenizer.strip_leading_space:  # which `encode` puts before every text
            if not text.startswith(" "):
                return None
            text = text[1:]
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

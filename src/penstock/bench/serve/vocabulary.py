"""What a random prompt is made of: token ids, or words that are one token each.

A prompt is drawn as indices into a vocabulary, so that the same workload can be sent as ids or as
text, and what is shared between prompts is known exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.tokenizer import Tokenizer

FALLBACK_SIZE = 256
"""Ids that every vocabulary has, for a server that doesn't say how many it knows."""

MIN_WORDS = 16
CHECKED_WORDS = 256

Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Indices 0 … size − 1, as token ids (`ids`) or as text (`words`)."""

    ids: Indices  # [size]
    words: Sequence[str] | None  # [size]; None: only ids can be sent, or `write` says the text
    source: str  # where it comes from, for the report
    write: Callable[[list[int]], str] | None = None  # ids as text, of prompts that were one

    @property
    def size(self) -> int:
        """How many different tokens a prompt may have."""
        return len(self.ids)

    def as_ids(self, prompt: Indices) -> list[int]:
        """The prompt as token ids."""
        ids: list[int] = self.ids[prompt].tolist()
        return ids

    def as_text(self, prompt: Indices) -> str:
        """The prompt as text with as many tokens (before what the server puts around it)."""
        if self.write is not None:
            return self.write(self.as_ids(prompt))
        assert self.words is not None
        return "".join(map(self.words.__getitem__, prompt.tolist()))


def of_size(size: int, source: str, picture: int | None = None) -> Vocabulary:
    """The ids below `size`. picture: the one that stands for pictures, which isn't among them."""
    ids = np.arange(size, dtype=np.int32)
    return Vocabulary(ids[ids != picture], None, source)


def of_ids(tokenizer: Tokenizer, name: str) -> Vocabulary:
    """Every id of a tokenizer but the special ones."""
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    return Vocabulary(np.array(ids, np.int32), None, name)


def of_texts(tokenizer: Tokenizer, name: str) -> Vocabulary:
    """Every id of a tokenizer, for prompts that are real text."""
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    return Vocabulary(ids, None, name, partial(tokenizer.decode, skip_special_tokens=False))


def of_words(tokenizer: Tokenizer, name: str) -> Vocabulary:
    """Tokens that are a space and a word: put together, they stay one token each.

    Raises `ConfigError` where the tokenizer has too few of them.
    """
    words: dict[int, str] = {}
    for i in range(tokenizer.vocab_size):
        if i in tokenizer.special_ids:
            continue
        piece = tokenizer.token_bytes(i)
        if len(piece) > 2 and piece[:1] == b" " and piece[1:].isalpha() and piece.isascii():
            words[i] = piece.decode("ascii")
    if len(words) >= MIN_WORDS:
        words = {i: word for i, word in words.items() if _is_one_token(tokenizer, word, i)}
    if len(words) < MIN_WORDS or not _stay_apart(tokenizer, words):
        raise ConfigError(
            f"{name} has {len(words)} words that stay one token each within a text, and "
            f"{MIN_WORDS} are needed to write prompts of a known length. Send token ids: "
            "--backend openai --prompt-form ids."
        )
    return Vocabulary(np.array(list(words), np.int32), list(words.values()), name)


def _is_one_token(tokenizer: Tokenizer, word: str, token_id: int) -> bool:
    ids = tokenizer.encode(word + word, add_special_tokens=False)
    return ids[-2:] == [token_id, token_id]


def _stay_apart(tokenizer: Tokenizer, words: dict[int, str]) -> bool:
    """Whether a mixture of the words is read as they were put together."""
    mixed = random.Random(0).choices(list(words), k=CHECKED_WORDS)
    ids = tokenizer.encode("".join(words[i] for i in mixed), add_special_tokens=False)
    return ids[-CHECKED_WORDS:] == mixed

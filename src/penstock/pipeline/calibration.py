"""The text that a quantized model is fitted to: tokens in windows, and which they were."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.tokenizer import Tokenizer, VocabMap

NUM_SAMPLES = 128
WINDOW = 512
LEAST_TOKENS = 256
"""Fewer say nothing about a matrix of any size."""

FEW_SAMPLES = 32
"""Fewer windows than this, where more were asked for, are told of."""

SEPARATOR = "<|endoftext|>"

logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Windows of tokens, each a sequence of its own."""

    name: str
    windows: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """In all windows."""
        return sum(map(len, self.windows))

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(map(len, self.windows))

    @property
    def sha256(self) -> str:
        """Of the windows' lengths and tokens."""
        digest = hashlib.sha256()
        for window in self.windows:
            digest.update(len(window).to_bytes(4, "little"))
            digest.update(torch.tensor(window, dtype=torch.int32).numpy().tobytes())
        return digest.hexdigest()

    def key(self) -> dict[str, str]:
        """What a result that depends on it is known by."""
        return {"name": self.name, "sha256": self.sha256}

    def tensors(self) -> list[Tensor]:
        """Each window [T] int32."""
        return [torch.tensor(window, dtype=torch.int32) for window in self.windows]

    def first(self, count: int) -> CalibrationSet:
        """`count` of the windows, evenly spread."""
        return CalibrationSet(self.name, tuple(_spread(self.windows, count)))

    def check(self, vocab_size: int, max_position: int) -> None:
        """Raises ConfigError where the windows don't fit a model."""
        if self.num_tokens == 0:
            raise ConfigError(f"The calibration set {self.name!r} is empty.")
        for number, window in enumerate(self.windows):
            bad = [token for token in window if not 0 <= token < vocab_size]
            if bad:
                raise ConfigError(
                    f"Window {number} of the calibration set {self.name!r} has {len(bad)} tokens "
                    f"outside the vocabulary of {vocab_size}: {bad[:5]}. It was made with another "
                    "model's tokenizer."
                )
        if self.longest > max_position:
            raise ConfigError(
                f"The calibration set {self.name!r} has windows of {self.longest} tokens, but the "
                f"model was made for {max_position}. Set window={max_position}."
            )


def calibration_set(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    num_samples: int = NUM_SAMPLES,
    window: int = WINDOW,
    reduced: VocabMap | None = None,
) -> CalibrationSet:
    """Up to `num_samples` windows of `window` tokens from UTF-8 text files, evenly spread.

    Documents are parted by <|endoftext|> and follow each other in a window; each starts with what
    the model expects at the start. A text shorter than a window is one short window. reduced: of a
    model with fewer tokens, whose rows the windows hold then.
    Raises ConfigError below LEAST_TOKENS tokens, or for a file that can't be read.
    """
    texts = [_read(file) for file in files]
    name = ", ".join(file.name for file in files)
    return from_texts(
        texts, tokenizer, name, num_samples=num_samples, window=window, reduced=reduced
    )


def from_texts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    name: str,
    *,
    num_samples: int = NUM_SAMPLES,
    window: int = WINDOW,
    reduced: VocabMap | None = None,
) -> CalibrationSet:
    """As `calibration_set`, of texts in memory."""
    if num_samples < 1 or window < 2:
        raise ConfigError(
            f"{num_samples} calibration windows of {window} tokens: one of two is the least."
        )
    tokens: list[int] = []
    for text in documents(texts):
        ids = tokenizer.encode(text)
        tokens += ids if reduced is None else reduced.new[reduced.write(ids)].tolist()
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(
            f"The calibration text {name!r} has {len(tokens)} tokens, but {LEAST_TOKENS} are the "
            f"least, and {NUM_SAMPLES} windows of {WINDOW} are usual. Give more text."
        )
    whole = len(tokens) // window
    windows = [tuple(tokens[i * window : (i + 1) * window]) for i in range(whole)]
    if whole < min(num_samples, FEW_SAMPLES):
        logger.warning(
            "The calibration text %r has %d tokens, %d windows of %d; %d are usual. What is fitted "
            "to so little may be worse than what is rounded to nearest.",
            name, len(tokens), whole, window, NUM_SAMPLES,
        )  # fmt: skip
    return CalibrationSet(name, tuple(_spread(windows, num_samples)) or (tuple(tokens),))


def documents(texts: Iterable[str]) -> list[str]:
    """The documents of some texts, which <|endoftext|> parts."""
    parts = (part.strip() for text in texts for part in text.split(SEPARATOR))
    return [part for part in parts if part]


def _spread(windows: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    count = min(count, len(windows))
    return [windows[i * len(windows) // count] for i in range(count)]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The calibration text {file} isn't UTF-8 ({error.reason} at byte {error.start})."
        ) from error
    except OSError as error:
        raise ConfigError(f"The calibration text {file} can't be read: {error}.") from error

"""What a model makes of texts it hasn't seen: perplexity, bits per byte, next-token accuracy.

A text is one or more documents, parted by <|endoftext|>. Each starts as its tokenizer starts a text
and is read in windows that overlap, so that every token but a document's first few is predicted
from at least window − stride tokens before it.
Source: strided windows: Press et al. 2021, arXiv:2012.15832; bits per byte, which don't depend on
the tokenizer: Gao et al. 2020, arXiv:2101.00027.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bench.drift import Drift, DriftSum, logits_of
from penstock.bench.reference_run import ReferenceRun, RunWriter
from penstock.errors import ConfigError
from penstock.runtime import Runtime
from penstock.tokenizer import Tokenizer

MARK = "<|endoftext|>"
"""Between the documents of a text file."""


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a document, and which of its tokens count."""

    ids: Sequence[int]
    first: int  # the first of `ids` that is scored; those before it are context


@dataclass(slots=True)
class Text:
    """A named text, tokenized."""

    name: str
    documents: list[list[int]]


@dataclass(slots=True)
class TextScore:
    """One model on one text."""

    name: str
    documents: int
    tokens: int = 0  # that were predicted
    bytes: int = 0  # that these stand for
    nats: float = 0.0
    correct: int = 0  # tokens that were the likeliest
    drift: Drift | None = None  # of another precision, or from a reference run

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def accuracy(self) -> float:
        """Share of tokens that were the likeliest."""
        return self.correct / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {
            "name": self.name,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats_per_token": self.nats / self.tokens,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "next_token_accuracy": self.accuracy,
        }
        if self.drift is not None:
            drift = self.drift
            found["drift"] = {
                "kl": drift.kl,
                "kl_p99": drift.kl_p99,
                "same_likeliest_token": drift.agreement,
                "perplexity": drift.perplexity,
            }
        return found


def read_text(file: Path, tokenizer: Tokenizer, max_bytes: int | None = None) -> Text:
    """The file's documents, or so many of them as have `max_bytes` together.

    Raises ConfigError for a file that isn't UTF-8 or holds no text.
    """
    try:
        whole = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} isn't UTF-8 text: {error}.") from error
    documents: list[list[int]] = []
    left = len(whole.encode()) if max_bytes is None else max_bytes
    for document in whole.split(MARK):
        data = document.strip("\n").encode()
        ids = tokenizer.encode(data[:left].decode("utf-8", "ignore"))
        left = max(0, left - len(data))
        if len(ids) > 1:
            documents.append(ids)
    if not documents:
        raise ConfigError(f"{file} holds no text to score.")
    return Text(file.name, documents)


def windows_of(ids: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """Windows of up to `window` tokens; each token but the first is scored in just one."""
    scored = 1
    while scored < len(ids):
        start = 0 if scored == 1 else scored - (window - stride)
        end = min(start + window, len(ids))
        yield Window(ids[start:end], scored - start)
        scored = end


def evaluate(
    runtime: Runtime,
    tokenizer: Tokenizer,
    text: Text,
    window: int,
    stride: int,
    *,
    against: Runtime | None = None,
    reference: ReferenceRun | None = None,
    save: RunWriter | None = None,
) -> TextScore:
    """Score `text`, in windows of `window` tokens of which `stride` are new.

    against: another precision of the model, whose drift from this one is measured. reference: a
    saved run that this one's drift from is measured. save: keeps this run.
    """
    check_window(window, stride)
    score = TextScore(text.name, len(text.documents))
    lengths = tokenizer.piece_table(skip_special_tokens=True)
    drift = DriftSum()
    for ids in text.documents:
        for piece in windows_of(ids, window, stride):
            logits = logits_of(runtime, piece.ids)[piece.first - 1 : -1]
            targets = torch.tensor(piece.ids[piece.first :])
            nats, correct = loss_of(logits, targets)
            score.nats += nats
            score.correct += correct
            score.tokens += len(targets)
            score.bytes += sum(len(lengths[i]) for i in piece.ids[piece.first :])
            if against is not None:
                theirs = logits_of(against, piece.ids)[piece.first - 1 : -1]
                drift.add(logits, theirs, targets)
            if reference is not None:
                drift.add(reference.next(text.name, targets), logits, targets)
            if save is not None:
                save.add(text.name, logits.log_softmax(-1), targets)
    if against is not None or reference is not None:
        score.drift = drift.result()
    return score


def check_window(window: int, stride: int) -> None:
    """Raises ConfigError unless 1 ≤ stride < window."""
    if not 1 <= stride < window:
        raise ConfigError(
            f"A window of {window} tokens with a stride of {stride}: the stride must be at least 1 "
            "and below the window."
        )


def loss_of(logits: Tensor, targets: Tensor) -> tuple[float, int]:
    """Nats of the targets [T] under logits [T, V], and how many were the likeliest."""
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])
    return -float(chosen.double().sum()), int((logits.argmax(-1) == targets).sum())

"""What a model makes of texts it hasn't seen: perplexity, bits per byte, next-token accuracy.

Source: bits per byte, which don't depend on the tokenizer: Gao et al. 2020, arXiv:2101.00027.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.bench.drift import Drift, DriftSum, Place, check_finite, coarser
from penstock.bench.reader import LocalReader, Reader
from penstock.bench.reference_run import ReferenceRun, RunWriter
from penstock.bench.texts import Text, check_window, read_text, windows_of
from penstock.bench.vocabularies import Shared
from penstock.runtime import Runtime

__all__ = ["Text", "TextScore", "check_window", "evaluate", "loss_of", "read_text", "windows_of"]


@dataclass(slots=True)
class TextScore:
    """One model on one text."""

    name: str
    documents: int
    tokens: int = 0  # that were predicted
    bytes: int = 0  # of the text that these are; 0 where it isn't known
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
            "bits_per_byte": self.bits_per_byte if self.bytes else None,
            "next_token_accuracy": self.accuracy,
        }
        if self.drift is not None:
            found["drift"] = self.drift.as_dict()
        return found


def evaluate(
    runtime: Runtime,
    text: Text,
    window: int,
    stride: int,
    *,
    against: Reader | None = None,
    reference: ReferenceRun | None = None,
    save: RunWriter | None = None,
) -> TextScore:
    """Score `text`, in windows of `window` tokens of which `stride` are new.

    against: another variant of the model, whose drift from this one is measured. reference: a
    saved run that this one's drift from is measured. save: keeps this run.
    Raises ModelError where a logit isn't finite.
    """
    check_window(window, stride)
    reader = LocalReader(runtime)
    kept, others = reader.kept(), None if against is None else against.kept()
    score = TextScore(text.name, len(text.documents), bytes=sum(text.sizes))
    drift = DriftSum(shared=None if against is None else Shared.of(reader, against))
    for number, ids in enumerate(text.documents):
        for piece in windows_of(ids, window, stride):
            place = Place(text.name, number, piece)
            reading = reader.read(piece.ids, piece.first)
            check_finite(reading, "The model", place, kept)
            logits = reading.logits
            targets = torch.tensor(piece.ids[piece.first :])
            nats, correct = loss_of(logits, targets)
            score.nats += nats
            score.correct += correct
            score.tokens += len(targets)
            if against is not None:
                other = against.read(piece.ids, piece.first)
                check_finite(other, "The other one", place, others)
                drift.add(logits, other.logits, targets, place)
            if reference is not None:
                was = reference.next(text.name, targets)
                drift.add(was.logprobs, logits, targets, likeliest=was.likeliest_beside(logits))
            if save is not None:
                save.add(text.name, logits, targets)
    if against is not None or reference is not None:
        names = "The model", "the other one"
        score.drift = drift.result(() if against is None else coarser(reader, against, names))
    return score


def loss_of(logits: Tensor, targets: Tensor) -> tuple[float, int]:
    """Nats of the targets [T] under logits [T, V], and how many were the likeliest."""
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])
    return -float(chosen.double().sum()), int((logits.argmax(-1) == targets).sum())

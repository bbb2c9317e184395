"""What is measured and what a peer must offer: small types that every file here shares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BATCH_CONTEXT = 128  # tokens of each prompt of `batch8`


class PeerError(Exception):
    """A peer couldn't do what it was asked; the text is its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts of `context` random tokens; what counts is the prompts' time or the tokens' after."""

    kind: str  # "decode" or "prefill"
    batch: int
    context: int  # tokens

    @property
    def name(self) -> str:
        if self.batch == 1:
            return f"{self.kind}@{self.context}"
        return f"batch{self.batch}" + ("" if self.context == BATCH_CONTEXT else f"@{self.context}")

    @classmethod
    def parse(cls, text: str) -> Work:
        """`decode@2000`, `prefill@512`, `batch8` (prompts of 128 tokens) or `batch8@2000`."""
        if found := re.fullmatch(r"(decode|prefill)@([1-9]\d*)", text):
            return cls(found[1], 1, int(found[2]))
        if found := re.fullmatch(r"batch([1-9]\d*)(?:@([1-9]\d*))?", text):
            return cls("decode", int(found[1]), int(found[2] or BATCH_CONTEXT))
        raise ValueError(
            f"{text!r} isn't a work. Say decode@CONTEXT, prefill@LENGTH, batchN or batchN@CONTEXT."
        )


@dataclass(frozen=True, slots=True)
class Format:
    """How a peer stores weights. Compared are formats of the same `bits`."""

    name: str  # in the peer's own words
    bits: int  # 16, 8 or 4
    matrix_bytes: float  # a weight of the layers' matrices, scales included
    head_bytes: float  # a weight of the head
    head: str  # the head's precision

    def weight_bytes(self, sizes: Sizes) -> int:
        """Read for each token."""
        return round(self.matrix_bytes * sizes.matrices + self.head_bytes * sizes.head)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Weights of a model that every token reads."""

    matrices: int  # of the layers
    head: int


@dataclass(frozen=True, slots=True)
class Settings:
    """How every engine is run."""

    threads: int
    tokens: int  # decoded and timed, for each sequence
    seed: int  # of the prompts
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A peer that can run here."""

    version: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A peer that can't, and why; `python -m benchmarks.peers --install NAME` mends it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One run: tokens/s of each work, by name."""

    speeds: dict[str, float]
    weight_bytes: int | None = None  # read for each token, where the engine knows it better


class Peer(Protocol):
    """An engine that can be measured."""

    name: str
    formats: tuple[Format, ...]
    install: str  # bash that makes it available, run in `home`

    def available(self) -> Found | Missing:
        """Its version, or why it can't run."""

    def prepare(self, checkpoint: Path, form: Format, cache: Path) -> Path:
        """The checkpoint in the peer's own form, made once in `cache`."""

    def run(self, model: Path, form: Format, works: Sequence[Work], settings: Settings) -> Reply:
        """Do every work once, in a process (or several, one after another) of its own."""

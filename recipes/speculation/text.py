"""Documents from a text file or JSON lines, as rows of tokens, some of them held out."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from penstock.errors import ConfigError
from recipes.batches import Batch

HELD_OUT_PERCENT = 2
SEPARATOR = "<|endoftext|>"  # between documents of a plain text file that has it
PARAGRAPH_CHARS = 1500  # documents of one that hasn't: whole paragraphs of about so much


@dataclass(frozen=True, slots=True)
class Document:
    """A text. `prompt`, its beginning: what a model is given to go on from."""

    text: str
    prompt: str | None = None
    held_out: bool | None = None  # None: a hash of the text decides

    @property
    def is_held_out(self) -> bool:
        if self.held_out is not None:
            return self.held_out
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def read_documents(path: Path) -> list[Document]:
    """Documents of a .jsonl file (`text`; optionally `prompt`, `held_out`) or of a plain text.

    A plain text is cut at <|endoftext|>, or else into whole paragraphs.
    """
    _must_exist(path)
    try:
        raw = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} isn't text in UTF-8: {error}") from error
    if path.suffix == ".jsonl":
        found = [_document(path, n, line) for n, line in enumerate(raw.splitlines(), 1) if line]
    elif SEPARATOR in raw:
        found = [Document(text.strip()) for text in raw.split(SEPARATOR)]
    else:
        found = [Document(text) for text in _paragraphs(raw)]
    found = [document for document in found if document.text]
    if not found:
        raise ConfigError(f"{path} has no text: {len(raw)} characters, all of them blank.")
    return found


def fingerprint(path: Path) -> str:
    """What tells one text from another, wherever it lies: its size and its hash."""
    _must_exist(path)
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return f"{path.stat().st_size:,} bytes with sha256 {digest[:16]}…"


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}: --data takes a text file or JSON lines.")


def _document(path: Path, number: int, line: str) -> Document:
    try:
        entry: Any = json.loads(line)
        text = entry["text"]
        prompt, held_out = entry.get("prompt"), entry.get("held_out")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'Line {number} of {path} isn\'t an object with a "text": {line[:60]!r}.'
        ) from error
    if not isinstance(text, str) or not isinstance(prompt, str | None):
        raise ConfigError(f"Line {number} of {path}: `text` and `prompt` must be strings.")
    if prompt is not None and not text.startswith(prompt):
        raise ConfigError(f"Line {number} of {path}: its text doesn't begin with its prompt.")
    if not isinstance(held_out, bool | None):
        raise ConfigError(f"Line {number} of {path}: `held_out` must be true or false.")
    return Document(text, prompt, held_out)


def _paragraphs(text: str) -> list[str]:
    found: list[str] = []
    group: list[str] = []
    for paragraph in text.split("\n\n"):
        group.append(paragraph)
        if sum(map(len, group)) >= PARAGRAPH_CHARS:
            found.append("\n\n".join(group).strip())
            group = []
    return [*found, "\n\n".join(group).strip()]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids; the first `given` of them are nobody's guess."""

    tokens: list[int]
    given: int = 1


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids, opened by the tokenizer's own special tokens unless the text has them."""
    begin = tokenizer.bos_token
    bare = isinstance(begin, str) and text.startswith(begin)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not bare, verbose=False)
    return ids


def text_rows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], length: int
) -> list[Row]:
    """Each document cut into rows of at most `length` tokens, those of one or two dropped."""
    rows = []
    for document in documents:
        ids = encode(tokenizer, document.text)
        rows += [Row(ids[i : i + length]) for i in range(0, len(ids), length)]
    return [row for row in rows if len(row.tokens) > 2]


def pad(rows: Sequence[Row]) -> Batch:
    """Rows of one length, filled up with zeros that count nothing."""
    width = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    weights = np.zeros((len(rows), width - 1), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        weights[i, row.given - 1 : len(row.tokens) - 1] = 1.0
    return Batch(torch.from_numpy(tokens), torch.from_numpy(weights), None)


class Rows:
    """Batches of rows of like length, in an order that the seed and the epoch decide.

    own: rows that the target wrote; each epoch has all of them, and of `text` as many as make up
    `text_share` of an epoch, the next ones each time. Without own rows it has all of `text`.
    """

    def __init__(
        self, text: Sequence[Row], own: Sequence[Row], rows: int, seed: int, text_share: float = 0.3
    ) -> None:
        if not text and not own:
            raise ConfigError(
                "There is nothing to train on: no document has more than two tokens and isn't "
                f"held out ({HELD_OUT_PERCENT}% are). Bring a longer text."
            )
        if not 0 <= text_share < 1:
            raise ConfigError(f"--text-share must be at least 0 and below 1, not {text_share}.")
        self.text, self.own, self.rows, self.seed = list(text), list(own), rows, seed
        wanted = round(len(own) * text_share / (1 - text_share)) if own else len(text)
        self.text_count = min(wanted, len(text))
        self.step = 0
        self._epoch: tuple[int, list[list[Row]]] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return math.ceil((len(self.own) + self.text_count) / self.rows)

    def state(self) -> dict[str, int]:
        """What `restore` needs to go on."""
        return {"step": self.step}

    def restore(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def epochs(self) -> float:
        """How often everything was read."""
        return self.step / len(self)

    def batch(self, progress: float) -> Batch:
        """The next rows; `progress` changes nothing here."""
        epoch, place = divmod(self.step, len(self))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._batches(epoch)
        self.step += 1
        return pad(self._epoch[1][place])

    def _batches(self, epoch: int) -> list[list[Row]]:
        generator = np.random.default_rng([self.seed, epoch])
        chosen = list(self.own)
        if self.text_count:
            order = np.random.default_rng(self.seed).permutation(len(self.text))
            at = (epoch * self.text_count + np.arange(self.text_count)) % len(self.text)
            chosen += [self.text[i] for i in order[at]]
        # a little noise, or the same rows would meet in every epoch
        lengths = np.array([len(row.tokens) for row in chosen])
        by_length = np.argsort(lengths * generator.uniform(0.9, 1.1, len(chosen)), kind="stable")
        batches = [
            [chosen[i] for i in by_length[start : start + self.rows]]
            for start in range(0, len(chosen), self.rows)
        ]
        return [batches[i] for i in generator.permutation(len(batches))]


def count_tokens(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """How often each token stands in rows, [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        np.add.at(counts, row.tokens, 1)
    return torch.from_numpy(counts)

"""Held-out texts: documents parted by <|endoftext|>, read in windows that overlap.

Each document starts as its tokenizer starts a text, and every token but its first few is predicted
from at least window − stride tokens before it.
Source: strided windows: Press et al. 2021, arXiv:2012.15832.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import ConfigError
from penstock.tokenizer import Tokenizer

MARK = "<|endoftext|>"
"""Between the documents of a text file."""


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a document, and which of its tokens count."""

    ids: Sequence[int]
    first: int  # the first of `ids` that is scored; those before it are context
    start: int = 0  # where in its document it begins


@dataclass(slots=True)
class Text:
    """A named text, tokenized."""

    name: str
    documents: list[list[int]]
    sizes: list[int] = field(default_factory=list)
    """Bytes of each document that are scored: all but those of a first token that nothing goes
    before. Empty where nobody asks."""


def read_documents(file: Path, max_bytes: int | None = None) -> list[str]:
    """The file's documents, or so many of them as have `max_bytes` together.

    Raises ConfigError for a file that can't be read or isn't UTF-8.
    """
    try:
        whole = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The text {file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} isn't UTF-8 text: {error}.") from error
    found: list[str] = []
    left = len(whole.encode()) if max_bytes is None else max_bytes
    for document in whole.split(MARK):
        data = document.strip("\n").encode()
        found.append(data[:left].decode("utf-8", "ignore"))
        left = max(0, left - len(data))
    return [document for document in found if document]


def text_of(file: Path, encoded: Sequence[list[int]]) -> Text:
    """The documents that have a token to predict.

    Raises ConfigError where there is none.
    """
    documents = [ids for ids in encoded if len(ids) > 1]
    if not documents:
        raise ConfigError(
            f"{file} holds no text to score: a document needs two tokens, and the longest of "
            f"{len(encoded)} has {max(map(len, encoded), default=0)}."
        )
    return Text(file.name, documents)


def read_text(file: Path, tokenizer: Tokenizer, max_bytes: int | None = None) -> Text:
    """The documents of `file` (of `max_bytes` at most) in tokens.

    Raises ConfigError for a file that isn't UTF-8 or holds no text.
    """
    parts = read_documents(file, max_bytes)
    encoded = [tokenizer.encode(part) for part in parts]
    text = text_of(file, encoded)
    text.sizes = [
        scored_bytes(part, ids, tokenizer)
        for part, ids in zip(parts, encoded, strict=True)
        if len(ids) > 1
    ]
    return text


def scored_bytes(document: str, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """The document's bytes, without those of the first of its tokens where that is text.

    Tokens' own bytes don't add up to it: a tokenizer may put a space before the text, or write what
    it reads in other characters.
    """
    data = document.encode()
    if tokenizer.encode("")[:1] == list(ids[:1]):  # it begins with a token of the tokenizer's
        return len(data)
    first = tokenizer.token_bytes(ids[0])
    if tokenizer.strip_leading_space or not data.startswith(first):
        first = first.removeprefix(b" ")  # which the tokenizer has put there
    return max(len(data) - len(first), 0)


def windows_of(ids: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """Windows of up to `window` tokens; each token but the first is scored in just one."""
    scored = 1
    while scored < len(ids):
        start = 0 if scored == 1 else scored - (window - stride)
        end = min(start + window, len(ids))
        yield Window(ids[start:end], scored - start, start)
        scored = end


def check_window(window: int, stride: int) -> None:
    """Raises ConfigError unless 1 ≤ stride < window."""
    if not 1 <= stride < window:
        raise ConfigError(
            f"A window of {window} tokens with a stride of {stride}: the stride must be at least 1 "
            "and below the window."
        )

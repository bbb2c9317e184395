"""Passages that were seen before, word for word or nearly.

Each passage is a set of hashed 8-word shingles, of which every eighth by value is kept: a sketch
that estimates how much of one text is contained in others, whatever their lengths.
Source: Broder 1997, "On the resemblance and containment of documents".
"""

import re
import zlib

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"[a-z0-9]+")
SHINGLE_WORDS = 8
KEEP_ONE_IN = 8
MIX = np.uint64(0x9E3779B97F4A7C15)


def sketch(text: str) -> NDArray[np.uint64]:
    """Hashes of every eighth shingle of `text`, distinct; case and punctuation don't count.

    A text of fewer than eight words is one shingle, which is kept.
    """
    words = [zlib.crc32(word.encode()) for word in WORD.findall(text.lower())]
    if not words:
        return np.zeros(0, np.uint64)
    ids = np.array(words, np.uint64)
    width = min(SHINGLE_WORDS, len(ids))
    hashes = np.zeros(len(ids) - width + 1, np.uint64)
    for i in range(width):
        hashes = (hashes ^ ids[i : len(ids) - width + 1 + i]) * MIX
        hashes ^= hashes >> np.uint64(29)
    kept = np.unique(hashes[hashes % np.uint64(KEEP_ONE_IN) == 0])
    return kept if len(kept) else hashes[:1]


class Seen:
    """What has been read so far. `share(text)` of a new passage is known already."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, text: str) -> None:
        self._hashes.update(sketch(text).tolist())

    def share(self, text: str) -> float:
        """How much of the sketch was seen: 0 for new text, 1 for a copy."""
        hashes = sketch(text).tolist()
        return sum(h in self._hashes for h in hashes) / len(hashes) if hashes else 0.0


def passages(text: str, size: int = 1500) -> list[str]:
    """Whole paragraphs in groups of at least `size` characters; joined by blank lines they are
    the text again."""
    found: list[str] = []
    group: list[str] = []
    for paragraph in text.split("\n\n"):
        group.append(paragraph)
        if sum(map(len, group)) >= size:
            found.append("\n\n".join(group))
            group = []
    if group:
        found.append("\n\n".join(group))
    return found


class Deduplicator:
    """Drops the passages of training documents that repeat held-out ones or earlier ones."""

    def __init__(self, held_out_limit: float = 0.2, limit: float = 0.5) -> None:
        self.held_out, self.training = Seen(), Seen()
        self.held_out_limit, self.limit = held_out_limit, limit
        self.dropped_bytes = 0

    def keep(self, text: str) -> str:
        """`text` without the passages that were seen before; empty if none is left."""
        kept = []
        for passage in passages(text):
            leaked = self.held_out.share(passage) > self.held_out_limit
            if leaked or self.training.share(passage) > self.limit:
                self.dropped_bytes += len(passage.encode())
                continue
            self.training.add(passage)
            kept.append(passage)
        return "\n\n".join(kept)

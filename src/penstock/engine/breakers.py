"""DRY's sequence breakers: the tokens in which one of some texts stands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

import numpy as np

from penstock.tokenizer import Tokenizer

_KEPT = 8
"""Answers that are remembered: each may name every token."""


class Breakers:
    """Looks for texts in all of a vocabulary's pieces at once; may be called in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._joined: tuple[np.ndarray, np.ndarray] | None = None
        self._known: OrderedDict[tuple[str, ...], frozenset[int]] = OrderedDict()
        self._lock = Lock()

    def find(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The tokens that hold one of `texts`."""
        with self._lock:
            known = self._known.get(texts)
            if known is not None:
                self._known.move_to_end(texts)
                return known
        found = self._search(text.encode(errors="surrogatepass") for text in texts)
        with self._lock:
            self._known[texts] = found
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def _search(self, texts: Iterable[bytes]) -> frozenset[int]:
        data, tokens = self._pieces()
        hit = np.zeros(self._tokenizer.vocab_size, dtype=bool)
        for text in texts:
            last = len(data) - len(text)
            if last < 0:
                continue
            places = np.flatnonzero(data[: last + 1] == text[0])
            for i, byte in enumerate(text[1:], 1):
                if not len(places):
                    break
                places = places[data[places + i] == byte]
            starts, ends = tokens[places], tokens[places + len(text) - 1]
            hit[starts[starts == ends]] = True  # not across two pieces
        return frozenset(np.flatnonzero(hit).tolist())

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all pieces one after the other, and which token each byte is of."""
        joined = self._joined
        if joined is None:  # two threads may both make it
            table = self._tokenizer.piece_table(skip_special_tokens=False)
            pieces = [table[token] for token in range(self._tokenizer.vocab_size)]
            data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
            sizes = [len(piece) for piece in pieces]
            tokens = np.repeat(np.arange(len(pieces), dtype=np.int32), sizes)
            joined = self._joined = data, tokens
        return joined

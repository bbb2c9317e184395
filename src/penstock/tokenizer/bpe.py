"""The merges of a BPE vocabulary by id: what a token is made of, and how to do without it.

Source: Sennrich et al. 2016, arXiv:1508.07909; bytes as the alphabet: Radford et al. 2019 (GPT-2);
fallback to byte pieces: Kudo & Richardson 2018, arXiv:1808.06226.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.errors import TokenizerError, listed
from penstock.tokenizer.pieces import byte_alphabet


class Bpe:
    """A vocabulary whose tokens are bytes, characters, and merges of two others."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Iterable[Sequence[str]],
        byte_fallback: bool,
        added: Iterable[int] = (),
    ) -> None:
        """added: ids of tokens that are found in a text before anything is merged. byte_fallback:
        characters that are no token are written in `<0x00>` … `<0xFF>`; else pieces are written in
        GPT-2's alphabet of bytes.

        Raises TokenizerError where bytes are missing: no set of its tokens could write any text.
        """
        self._vocab = vocab
        self.added = frozenset(added)
        self._pieces = {token: piece for piece, token in vocab.items()}
        self._fallback = byte_fallback
        names = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else list(byte_alphabet())
        missing = [name for name in names if name not in vocab]
        if missing:
            raise TokenizerError(
                f"The vocabulary lacks {len(missing)} of 256 bytes ({listed(missing)}), "
                "so not every text could be written without the tokens that are left out. Only "
                "byte-level BPE and BPE with byte fallback can be reduced."
            )
        self.byte_ids = [vocab[name] for name in names]
        self._byte_of = dict(zip(range(256), self.byte_ids, strict=True)) if byte_fallback else {}
        self._joins: dict[tuple[int, int], tuple[int, int]] = {}  # a pair: (rank, what it becomes)
        self._parts: dict[int, tuple[int, int]] = {}  # a token: its first pair
        for rank, (left, right) in enumerate(merges):
            ids = vocab.get(left), vocab.get(right), vocab.get(left + right)
            a, b, whole = ids
            if a is None or b is None or whole is None:
                continue  # the library would refuse such a file
            self._joins.setdefault((a, b), (rank, whole))
            self._parts.setdefault(whole, (a, b))

    @classmethod
    def from_json(cls, whole: Mapping[str, Any], name: str) -> Bpe:
        """Of a `tokenizer.json`. Raises TokenizerError for other algorithms."""
        model = whole["model"]
        fallback = bool(model.get("byte_fallback"))
        if model.get("type") != "BPE" or not (fallback or _is_byte_level(whole.get("decoder"))):
            raise TokenizerError(
                f"{name} is {model.get('type')}"
                f"{'' if model.get('type') != 'BPE' else ' over characters'}; only byte-level BPE "
                "and BPE with byte fallback can be reduced."
            )
        merges = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
        added = [token["id"] for token in whole.get("added_tokens") or ()]
        return cls(model["vocab"], merges, fallback, added)

    def closure(self, token: int) -> set[int]:
        """The token, the two it is merged from, what these are merged from, … ."""
        found: set[int] = set()
        waiting = [token]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self._parts.get(one, ())
        return found

    def rewrite(self, token: int, kept: Collection[int]) -> list[int] | None:
        """What merging gives for the token's text where only `kept` ids may come of it.

        kept must hold `byte_ids`. None where the vocabulary has no piece of this id.
        """
        piece = self._pieces.get(token)
        if piece is None:
            return None
        units: list[int] = []
        for character in piece:
            one = self._vocab.get(character)
            if one is not None and one in kept:
                units.append(one)
            elif not self._fallback:
                return None  # no byte's character
            else:
                units += [self._byte_of[byte] for byte in character.encode()]
        while True:
            joins = [
                (*join, i)
                for i, pair in enumerate(pairwise(units))
                if (join := self._joins.get(pair)) is not None and join[1] in kept
            ]
            if not joins:
                return units
            _, whole, at = min(joins)
            units[at : at + 2] = [whole]


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    parts = decoder.get("decoders") or [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)

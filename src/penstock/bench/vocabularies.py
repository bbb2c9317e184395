"""What two variants can be compared on: the tokens that both have, and a text written in them.

A reduced vocabulary lacks tokens, and KL(p ‖ q) is infinite where q can't give what p does. So it
is taken over the tokens C that both have, each distribution scaled to them: p_C(i) = p(i) / Σ_C p.
What is left out, 1 − Σ_C p, is a figure of its own. By the chain rule they are the parts of the
whole: KL(q ‖ p) = KL(q ‖ p_C) − ln Σ_C p for a q that has only C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.bench.reader import Reader
from penstock.errors import ConfigError

Names = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens of two variants of which one lacks some, as ids [N] int64, ascending."""

    ids: Tensor  # that both have
    only: tuple[Tensor, Tensor]  # that only the first has, and only the second

    @staticmethod
    def of(a: Reader, b: Reader) -> Shared | None:
        """None where both have the whole vocabulary."""
        kept = a.kept(), b.kept()
        if kept == (None, None):
            return None
        has = torch.zeros((2, a.about.vocab_size), dtype=torch.bool)
        for row, ids in zip(has, kept, strict=True):
            row[slice(None) if ids is None else ids] = True
        both, first, second = has[0] & has[1], has[0] & ~has[1], has[1] & ~has[0]
        return Shared(_ids(both), (_ids(first), _ids(second)))


def _ids(has: Tensor) -> Tensor:
    return has.nonzero().flatten()


def check_vocabularies(a: Reader, b: Reader, names: Names) -> None:
    """Raises ConfigError unless a token id means the same to both."""
    sizes = a.about.vocab_size, b.about.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{names[0]} and {names[1]} have vocabularies of {sizes[0]:,} and {sizes[1]:,} tokens: "
            "their distributions can't be compared."
        )
    for i, (mine, theirs) in enumerate(zip(a.pieces(), b.pieces(), strict=True)):
        if mine != theirs:
            raise ConfigError(
                f"The tokenizers differ: token {i} is {_shown(mine)} in {names[0]} and "
                f"{_shown(theirs)} in {names[1]}. Distributions over different tokens can't be "
                "compared."
            )


def encode_for_both(
    text: str, documents: Sequence[str], a: Reader, b: Reader, names: Names
) -> tuple[list[list[int]], str]:
    """The documents in tokens that both have; and a remark where one would write it in others.

    Raises ConfigError where the tokenizers make different tokens of them, or where each vocabulary
    lacks some of the other's.
    """
    mine, theirs = a.encode(documents), b.encode(documents)
    shared = Shared.of(a, b)
    if shared is None:
        check_encodings(text, mine, theirs, names)
        return mine, ""
    pieces, has = a.pieces(), set(shared.ids.tolist())
    for number, both in enumerate(zip(mine, theirs, strict=True)):
        one, two = (b"".join(pieces[i] for i in ids) for ids in both)
        if one != two:
            raise ConfigError(
                f"The tokenizers differ: {text}, document {number + 1}, is other text in the "
                f"tokens of {names[0]} than in those of {names[1]}. Compare models that read a "
                "text alike."
            )
    smaller, other = (0, 1) if len(shared.only[0]) <= len(shared.only[1]) else (1, 0)
    chosen, usual = ((mine, theirs)[i] for i in (smaller, other))
    missing = [i for document in chosen for i in document if i not in has]
    if missing:
        raise ConfigError(
            f"{text} needs {len(set(missing)):,} tokens that {names[other]} lacks, "
            f"{_shown(pieces[missing[0]])} the first of them, and neither vocabulary holds the "
            "other. Compare each with the whole model."
        )
    if mine == theirs:
        return chosen, ""
    return chosen, (
        f"{text} is {sum(map(len, chosen)):,} tokens instead of {sum(map(len, usual)):,}: those "
        f"that {names[smaller]} lacks are written in others."
    )


def check_encodings(
    text: str, a: Sequence[list[int]], b: Sequence[list[int]], names: Names
) -> None:
    """Raises ConfigError unless both tokenizers made the same tokens of a text's documents."""
    for number, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        if mine == theirs:
            continue
        pairs = enumerate(zip(mine, theirs, strict=False))
        same = next((i for i, (x, y) in pairs if x != y), min(len(mine), len(theirs)))
        raise ConfigError(
            f"The tokenizers differ: {text}, document {number + 1}, is {len(mine):,} tokens in "
            f"{names[0]} and {len(theirs):,} in {names[1]}, and they part at token {same:,}. "
            "Compare models that read a text alike."
        )


def _shown(piece: bytes) -> str:
    return repr(piece.decode("utf-8", "backslashreplace")) if piece else "nothing"

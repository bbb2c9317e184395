"""Prompts that begin alike and come at once: the first computes what they share.

What another sequence computes in the step that is being planned can't be found in the prefix tree
yet. Whoever needs it is set aside for that step, and those behind it go first. So a trace has as
many hits as if every request came after the one before it was done.

Nobody waits long. A sequence is only looked at while the step has room for more tokens, so those
that run were given all that they have to compute: after the step it is there to be found, and the
next wait is for a later block. (Prompts whose logits are read may get less, and who is held back
until its mate runs gives back what it got: nobody waits for either. The mate may wait for room.)
Source: Zheng et al. 2023, arXiv:2312.07104, whose cache-aware order has the same aim.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.config import PROMPT_LOGITS
from penstock.engine.lockstep import is_held_back
from penstock.engine.request import Sequence


def filling_beside(
    sequence: Sequence, running: Iterable[Sequence], block_size: int
) -> list[Sequence]:
    """Those that run and compute whole blocks which `sequence` may come to need."""
    return [
        s
        for s in running
        if s.num_computed // block_size < len(s.tokens) // block_size
        and s not in sequence.mates
        and not is_held_back(s)
        and not (s.reads_logits and s.remaining > PROMPT_LOGITS)  # given less than there is
    ]


def awaits(sequence: Sequence, hit: int, block_size: int, running: Iterable[Sequence]) -> bool:
    """Whether the block after the `hit` tokens it can find is just being computed for another."""
    end = hit + block_size
    if end >= len(sequence.tokens):  # the last token is never found
        return False
    keys, salt = sequence.keys[:end], sequence.request.salt
    return any(
        other.num_computed < end <= len(other.tokens)
        and other.tokens[hit] == sequence.tokens[hit]  # most differ there, and few see pictures
        and other.keys[hit:end] == keys[hit:]
        and other.keys[:hit] == keys[:hit]
        and other.request.salt == salt
        for other in running
    )

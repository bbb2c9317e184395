"""A step in parts, one after another, that stages of a model compute at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.step import Step

PART_TOKENS = 64
"""Of a part, at least: fewer would read weights more often than products need."""

PARTS = 8
"""For each stage, at most: of n parts n + stages − 1 are waited for."""


def parts_of(step: Step, stages: int) -> list[Step]:
    """A step in parts of consecutive tokens; a short one, or one with copies, whole.

    Each part is a step of its own: what it reads was written by those before it.
    """
    total = step.num_tokens
    count = min(total // PART_TOKENS, PARTS * stages)
    if count < 2 or step.copies is not None:
        return [step]
    return [part(step, i * total // count, (i + 1) * total // count) for i in range(count)]


def largest_part(tokens: int, stages: int) -> int:
    """The most tokens of a part, of steps of up to so many."""
    whole = min(tokens, 2 * PART_TOKENS - 1)
    most = PARTS * stages * PART_TOKENS  # from where on parts grow
    inside = -(-min(tokens, most) // max(min(tokens, most) // PART_TOKENS, 1))
    return max(whole, inside, -(-tokens // (PARTS * stages)))


def part(step: Step, first: int, end: int) -> Step:
    """The tokens from `first` to `end` of a step."""
    starts = step.query_start.clamp(first, end)
    has = starts[1:] > starts[:-1]
    left = step.query_start[1:] - starts[1:]  # tokens of a sequence that come after
    inside = (step.sample_at >= first) & (step.sample_at < end)
    return Step(
        step.tokens[first:end],
        step.positions[first:end],
        step.slots[first:end],
        torch.cat([starts[:1], starts[1:][has]]) - first,
        (step.context_len - left.clamp(min=0))[has],
        step.block_table[has],
        step.sample_at[inside] - first,
    )


def joined(found: Sequence[Tensor], step: Step, parts: Sequence[Step]) -> Tensor:
    """What was found of the parts' sampled rows, in the order of the whole step's."""
    if len(parts) == 1:
        return found[0]
    first, order = 0, []
    for one in parts:
        at = step.sample_at
        order.append(((at >= first) & (at < first + one.num_tokens)).nonzero().squeeze(1))
        first += one.num_tokens
    together = torch.cat(list(found))
    out = torch.empty_like(together)
    out[torch.cat(order)] = together
    return out

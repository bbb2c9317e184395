"""What a scheduler decides: one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.outputs import PreemptionRecord
from penstock.engine.request import Sequence

Part = tuple[Sequence, int]
"""A sequence and how many of its next tokens take part in a step."""


@dataclass(slots=True)
class Swap:
    """Blocks of one request that leave the cache together, or come back."""

    group: list[Sequence]
    record: PreemptionRecord
    pairs: list[tuple[int, int]]  # (block, slot) on the way out, (slot, block) back
    slots: list[int] = field(default_factory=list)  # on the way back: to release after the copy


@dataclass(slots=True)
class Plan:
    """One step: its sequences with their new tokens, and blocks to copy before it.

    Swaps out come first, then copies, then swaps in: each reads what was there before the plan.
    """

    parts: list[Part] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), all at once
    swaps_out: list[Swap] = field(default_factory=list)
    swaps_in: list[Swap] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def num_read(self) -> int:
        """Tokens of prompts whose logits are read."""
        return sum(count for sequence, count in self.parts if sequence.reads_logits)

    @property
    def moves_blocks(self) -> bool:
        """Whether anything is to be copied before the step."""
        return bool(self.copies or self.swaps_out or self.swaps_in)

    def take(self, sequence: Sequence, count: int) -> None:
        """`count` tokens of `sequence` take part."""
        self.parts.append((sequence, count))
        self.num_tokens += count

    def drop(self, sequence: Sequence) -> None:
        """`sequence` takes no part; nothing is copied into its blocks, which others may get."""
        gone = set(sequence.blocks)
        self.parts = [part for part in self.parts if part[0] is not sequence]
        self.copies = [copy for copy in self.copies if copy[1] not in gone]
        self.num_tokens = sum(count for _, count in self.parts)

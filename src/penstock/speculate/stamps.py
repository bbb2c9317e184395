"""What a draft model's cache holds, block by block.

Its keys and values lie in the same blocks as the target's, which are given out, shared and given up
by what the target has computed. What the draft has computed is another matter: a stamp per block
says of which tokens. So a block that a prompt finds in the prefix tree is used or computed by what
is in it, whoever computed it, and one that was somebody else's in between is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = 0
_POSITIVE = (1 << 62) - 1


def mark_after(mark: int, tokens: Sequence[int]) -> int:
    """The stamp of a block of `tokens` that follows the block of stamp `mark`; NOTHING: the first.

    By 62 bits of hash: two prefixes with the same one would cost a wrong guess, nothing else.
    """
    return (hash((mark, *tokens)) & _POSITIVE) + 1


class Stamps:
    """Of each block: the mark of its tokens and those before it, once it is computed completely.

    NOTHING where there is nothing to be relied on; below that, the sequence that is writing in it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._of = [NOTHING] * num_blocks
        self._swapped: dict[int, int] = {}  # by slot

    def set(self, block: int, mark: int) -> None:
        """The block holds that now."""
        self._of[block] = mark

    def of(self, blocks: Sequence[int]) -> list[int]:
        """What each of `blocks` holds."""
        held = self._of
        return [held[block] for block in blocks]

    def walk(
        self, tokens: Sequence[int], blocks: Sequence[int], size: int, known: Sequence[int] = ()
    ) -> list[int]:
        """The marks of the first blocks as far as they hold `tokens`, block after block.

        known: those of the first, which needn't be looked at.
        """
        found = list(known)
        mark = found[-1] if found else NOTHING
        for at in range(len(found), len(tokens) // size):
            mark = mark_after(mark, tokens[at * size : (at + 1) * size])
            if self._of[blocks[at]] != mark:
                break
            found.append(mark)
        return found

    # ── blocks move with their contents ──────────────────────────────────────────────────────

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied, (from, to). A block that is being written in is the writer's."""
        held = [max(self._of[source], NOTHING) for source, _ in pairs]
        for (_, target), mark in zip(pairs, held, strict=True):
            self._of[target] = mark

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied to swap slots, (block, slot)."""
        for block, slot in pairs:
            self._swapped[slot] = max(self._of[block], NOTHING)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Swap slots were copied back to blocks, (slot, block)."""
        for slot, block in pairs:
            self._of[block] = self._swapped.get(slot, NOTHING)

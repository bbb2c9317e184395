"""Where the latest tokens lie in full precision beside a cache of codes: `ops.kivi`.

A block of the cache has a place among the recent blocks from the step that begins it to the step
after which no query can see any of it as it was written. What has to be known for that is in every
step: who computes what, from which position on. A block that several sequences share (samples of
one prompt, or beams, which come to share what one of them has computed) keeps its place until a
step takes all of them on that hold it, and none of them can see it; or until all have gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import OutOfCacheError, PenstockError
from penstock.ops.kivi import KEY_GROUP
from penstock.step import KV, Step


def most_recent_blocks(
    window: int, block_size: int, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """How many blocks can be in some window, or be written in one step.

    A sequence between two steps needs the blocks of its last window + 31 tokens. Two samples or
    more can share as many again, which they have left one after the other; beams, as far as each
    other, leave what they share at once. A step adds the blocks of its tokens, the first of each
    sequence's cut.
    """
    each = _recent_of_one(window, block_size, max_model_len)
    alone = recent_blocks(window, block_size, max_model_len, max_num_seqs, max_num_batched_tokens)
    return alone + max_num_seqs + max_num_seqs // 2 * each


def recent_blocks(
    window: int, block_size: int, tokens: int, sequences: int, step_tokens: int
) -> int:
    """How many so many sequences of so many tokens fill that share none."""
    each = _recent_of_one(window, block_size, tokens)
    return sequences * each + -(-step_tokens // block_size)


def _recent_of_one(window: int, block_size: int, tokens: int) -> int:
    return min(-(-(window + KEY_GROUP - 1) // block_size) + 1, -(-tokens // block_size))


class RecentBlocks:
    """Gives places to blocks as they are begun, and takes them back."""

    def __init__(self, kv: KV, window: int, block_size: int) -> None:
        """kv: a cache with a window; all layers share `recent_slots`."""
        self._pools = [layer[4:6] for layer in kv]
        self._place_of = kv[0][6].numpy()  # of each block, or −1; what the kernels read
        self._block_at: list[int] = [-1] * self._pools[0][0].shape[0]
        self._free = list(range(len(self._block_at) - 1, -1, -1))
        self._window, self._block_size = window, block_size
        self.holders: Callable[[int], int] = lambda block: 1
        """How many sequences hold a block; without an engine, one each."""
        self.unsure = 0
        """How many of a step's last tokens may be guesses, which the next step computes anew."""

    @property
    def num_places(self) -> int:
        """Places that there are."""
        return len(self._block_at)

    @property
    def num_used(self) -> int:
        """Places that a block has."""
        return len(self._block_at) - len(self._free)

    def enter(self, step: Step) -> None:
        """Places for all that `step` writes, before it does.

        Raises PenstockError for a sequence that starts behind tokens whose values as they were
        written are gone: nothing but their codes is left of them.
        """
        size, table = self._block_size, step.block_table.numpy()
        first, length = _spans(step)
        low, high = self._first_seen(first), -(-length // size)
        columns = low[:, None] + np.arange(max((high - low).tolist(), default=0))  # [B, a window]
        rows = np.arange(len(low))[:, None]
        seen = table[rows, np.minimum(columns, table.shape[1] - 1)]
        lacks = (self._place_of.take(seen) < 0) & (columns < high[:, None])
        if not lacks.any():
            return
        for row in lacks.any(axis=1).nonzero()[0].tolist():
            blocks = seen[row, : high[row] - low[row]]
            (lacking,) = (self._place_of[blocks] < 0).nonzero()  # a row before may have begun some
            if len(lacking) == 0:
                continue
            begins = int(low[row] + lacking[0]) * size
            if begins < first[row]:
                raise PenstockError(
                    f"A query at position {first[row]} sees the tokens from {begins} on as they "
                    "were written, but only their codes are left. A cache with a window can't be "
                    "entered in the middle: compute the sequence from its first token."
                )
            self._give(blocks[lacking].tolist())

    def leave(self, step: Step) -> None:
        """Take back the places that nobody needs any more, after `step` was computed.

        A sequence is one row of a step: drafts that are trees, several rows of one, are refused.
        """
        following = _spans(step)[1] - self.unsure
        coded = self._first_seen(following)  # [B] blocks of each that no query can see
        blocks = step.block_table.numpy()[:, : max(coded.tolist(), default=0)]
        held = self._place_of.take(blocks) >= 0
        held &= np.arange(blocks.shape[1]) < coded[:, None]
        passed, by = np.unique(blocks[held], return_counts=True)
        for block, count in zip(passed.tolist(), by.tolist(), strict=True):
            if self.holders(block) <= count:  # or one that isn't in this step may still see it
                self._take(block)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks' recent tokens, (from, to), all at once; a copy gets a place of its own."""
        pairs = [pair for pair in pairs if self._place_of[pair[0]] >= 0]
        if not pairs:
            return
        source = torch.from_numpy(self._place_of[[a for a, _ in pairs]]).long()
        held = [[part[source] for part in pool] for pool in self._pools]
        self._give(b for _, b in pairs if self._place_of[b] < 0)
        target = torch.from_numpy(self._place_of[[b for _, b in pairs]]).long()
        for pool, copies in zip(self._pools, held, strict=True):
            for part, copied in zip(pool, copies, strict=True):
                part[target] = copied

    def _first_seen(self, position: NDArray[np.int32]) -> NDArray[np.int32]:
        """The first block of which a query at `position` [B] sees anything as it was written."""
        # that of `recent_from(position)`: a block holds whole groups
        return np.maximum(position - self._window, 0) // self._block_size

    def _give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._free:
                self._sweep()
            place = self._free.pop()
            self._place_of[block] = place
            self._block_at[place] = block

    def _take(self, block: int) -> None:
        place = int(self._place_of[block])
        self._place_of[block] = -1
        self._block_at[place] = -1
        self._free.append(place)

    def _sweep(self) -> None:
        """Take back the places of blocks that their sequences have let go."""
        for block in self._block_at:
            if self.holders(block) == 0:
                self._take(block)
        if not self._free:
            raise OutOfCacheError(
                f"All {len(self._block_at)} blocks of recent tokens are in use: more sequences or "
                "tokens at once than max_num_seqs and max_num_batched_tokens say. Raise them."
            )


def _spans(step: Step) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The position of each sequence's first query, and its length [B]; 0 of one without queries."""
    start = step.query_start.numpy()
    count = start[1:] - start[:-1]
    length = step.context_len.numpy() * (count > 0)
    return length - count, length

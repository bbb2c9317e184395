"""Which blocks of a request lie in the swap space, and which blocks they get when they return.

A request's running samples leave together and return together, because they share blocks: each of
these is stored once. What is written here is numbers; the engine moves the bytes, out before the
step that may overwrite them, back before the step that reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from penstock.cache import BlockPool, Node, SwapSpace
from penstock.engine.plan import Plan
from penstock.engine.request import Request, Sequence, Status

Find = Callable[[Sequence], list[Node]]
"""The cached prefix of a sequence, as nodes whose blocks aren't held yet."""


class Swapper:
    """Gives slots for blocks, and blocks for slots."""

    def __init__(self, space: SwapSpace, pool: BlockPool, block_size: int, find: Find) -> None:
        self.space = space
        self.groups: dict[Request, list[Sequence]] = {}  # those that are out
        self.num_sequences = 0  # in all groups; a number, for whoever asks from another thread
        self._pool = pool
        self._block_size = block_size
        self._find = find

    def _written(self, sequence: Sequence) -> list[int]:
        """Its blocks that hold anything; it may have got others for the step being planned."""
        return sequence.blocks[: -(-sequence.num_computed // self._block_size)]

    def group_of(self, victim: Sequence) -> list[Sequence]:
        """Who leaves with `victim`; nobody, not even it, where they can't.

        A request has one group outside at a time: two might need more blocks than there are when
        they return, for what they shared is then stored twice.
        """
        request = victim.request
        if self.space.num_slots == 0 or request in self.groups:
            return []
        group = [s for s in request.sequences if s.status is Status.RUNNING]
        if any(s.overdue != victim.overdue for s in group):
            return []  # some of them may not be made to give way
        if any(self._pool.empty in s.blocks for s in group):
            return []  # a window has passed blocks by: what isn't there can't come back
        return group

    def stake(self, group: Seq[Sequence]) -> tuple[int, int]:
        """Blocks to copy if `group` leaves, and how many of them others hold as well."""
        held = Counter(block for s in group for block in self._written(s))
        count = self._pool.count
        return len(held), sum(count(block) > own for block, own in held.items())

    def leave(self, group: Seq[Sequence], plan: Plan) -> list[tuple[int, int]]:
        """Slots for what `group` has computed; (block, slot) to copy.

        Empty when there aren't enough; nothing has changed then.
        """
        origin = {to: source for source, to in plan.copies}  # the copy isn't there yet
        held = [[origin.get(block, block) for block in self._written(s)] for s in group]
        unique = list(dict.fromkeys(block for blocks in held for block in blocks))
        slots = self.space.allocate(len(unique))
        if not slots:
            return []
        slot_of = dict(zip(unique, slots, strict=True))
        first = set(slots)
        for sequence, blocks in zip(group, held, strict=True):
            sequence.slots = [slot_of[block] for block in blocks]
            for slot in sequence.slots:
                if slot in first:
                    first.remove(slot)  # `allocate` holds it once already
                else:
                    self.space.share(slot)
        self.groups[group[0].request] = list(group)
        self.num_sequences += len(group)
        return list(slot_of.items())

    def come_back(self, group: Seq[Sequence], spare: int) -> list[tuple[int, int]] | None:
        """Blocks for all that `group` has in slots; (slot, block) to copy.

        What the prefix tree still has is used as it is. None when fewer than `spare` blocks would
        be left over; nothing has changed then. The caller releases the slots after the copy.
        """
        size, pool = self._block_size, self._pool
        placed: dict[int, int] = {}  # where each slot's bytes are: full blocks only
        for s in group:
            s.nodes = self._find(s)[: s.num_computed // size]
            s.blocks = [node.block for node in s.nodes]
            for block in s.blocks:
                pool.share(block)
            placed |= zip(s.slots, s.blocks, strict=False)
        wanted = self._missing(group, placed)
        enough = pool.num_available >= len(wanted) + spare
        new = pool.allocate(len(wanted)) if enough else None
        if new is None:
            for s in group:
                pool.release(reversed(s.blocks))
                s.nodes, s.blocks = [], []
            return None
        pairs = list(zip(wanted, new, strict=True))
        fresh = iter(new)
        for s in group:
            for at in range(len(s.blocks), len(s.slots)):
                slot = s.slots[at]
                if slot in placed:
                    pool.share(placed[slot])
                    s.blocks.append(placed[slot])
                else:
                    s.blocks.append(next(fresh))
                    if at < s.num_computed // size:
                        placed[slot] = s.blocks[-1]
        del self.groups[group[0].request]
        self.num_sequences -= len(group)
        return pairs

    def _missing(self, group: Seq[Sequence], placed: dict[int, int]) -> list[int]:
        """Slots that need a block, in the order of their holders.

        A block that isn't full is one's own on return: its holder is about to write in it.
        """
        wanted, seen = [], set(placed)
        for s in group:
            for at in range(len(s.blocks), len(s.slots)):
                slot = s.slots[at]
                if slot not in seen:
                    wanted.append(slot)
                    if at < s.num_computed // self._block_size:
                        seen.add(slot)
        return wanted

    def forget(self, sequence: Sequence) -> None:
        """Release the slots of `sequence`, which won't come back from there."""
        self.space.release(sequence.slots)
        sequence.slots = []
        group = self.groups.get(sequence.request)
        if group is not None and sequence in group:
            group.remove(sequence)
            self.num_sequences -= 1
            if not group:
                del self.groups[sequence.request]

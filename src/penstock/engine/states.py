"""Who has which state, of models whose layers have states in place of keys and values.

A state is what all of a sequence's tokens so far have left: it can't be cut where a block ends. A
step reads a sequence's slot and writes another, which becomes the sequence's when the step has
succeeded: one that fails is computed again. So each that runs has two slots at most, and one for
each of its guesses, of which those after wrong ones are given back.

What others may begin with is a state after a whole number of blocks, known by the prefix tree's
node there. A step can leave such states on its way: after the last whole block of a prompt, where
a prompt that came before went another way, and where a pin ends. While a sequence goes on, the
state after its latest whole block is known too, and takes the place of the one before. They lie in
slots that nobody else needs and are given up as blocks are, the longest unused first.
Source: Pan et al. 2024, arXiv:2411.19379 (Marconi), which keeps states where prompts part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.cache import BlockPool, Node, PagedLayout, Pins, PrefixTree
from penstock.engine.plan import Part
from penstock.engine.request import Sequence


class States:
    """Gives slots to sequences, and knows which of them are after which prefix."""

    def __init__(
        self,
        num_slots: int,
        max_num_seqs: int,
        block_size: int,
        tree: PrefixTree | None,
        guesses: int = 0,
    ) -> None:
        """num_slots: two for each of `max_num_seqs`, those of all `guesses`, and more, of which
        pins may hold half. tree: None where nothing that was computed for one is another's.
        """
        self._pool = BlockPool(num_slots)
        self._size = block_size
        self._shares = tree is not None
        self._after: dict[int, Node] = {}  # of slots that are known: what they come after
        self._pinned: dict[Node, int] = {}  # the slots that pins hold
        self._most_pinned = max(num_slots - 2 * max_num_seqs - guesses, 0) // 2
        self._guesses = guesses
        self._pool.on_evict = self._evicted
        if tree is not None:
            tree.on_lose = self._lose

    def stats(self) -> dict[str, Any]:
        """Slots that sequences or pins hold, and those that are only known by what came before."""
        pool = self._pool
        used = {"slots": pool.num_blocks, "used": pool.num_used, "cached": pool.num_idle}
        return {"states": used}

    # ── where sequences begin ────────────────────────────────────────────────────────────────

    @staticmethod
    def found(nodes: list[Node]) -> list[Node]:
        """Of a cached prefix what a sequence can go on from: up to the last known state."""
        for count in range(len(nodes), 0, -1):
            if nodes[count - 1].state >= 0:
                return nodes[:count]
        return []

    def start(self, sequence: Sequence, tree: PrefixTree | None) -> None:
        """Go on from the state after its nodes. Others may want those where it ends, and where a
        prompt that came before went another way.
        """
        self.let_go(sequence)
        nodes = sequence.nodes
        if nodes:
            sequence.state = nodes[-1].state
            self._pool.share(sequence.state)
        if tree is None:
            return
        size, count = self._size, len(sequence.tokens)
        parts = len(tree.match(sequence.keys, sequence.request.salt))
        wanted = [parts * size, (count - 1) // size * size]
        wanted += [pin.tokens // size * size for pin in sequence.request.options.pins]
        sequence.marks = {mark for mark in wanted if len(nodes) * size < mark < count}

    def awaits(self, sequence: Sequence, hit: int, filling: Iterable[Sequence]) -> bool:
        """Whether another will leave a state further on than the `hit` tokens that can be found; it
        is asked to where they part.
        """
        keys, salt = sequence.keys, sequence.request.salt
        for other in filling:
            if other.request.salt != salt:
                continue
            common = self._alike(keys, other.keys)
            if max(hit, other.num_computed) < common < len(keys):
                other.marks.add(common)
                return True
        return False

    def _alike(self, a: list[int], b: list[int]) -> int:
        """Tokens of the whole blocks that both begin with."""
        size, most = self._size, min(len(a), len(b)) - self._size
        at = 0
        while at <= most and a[at : at + size] == b[at : at + size]:
            at += size
        return at

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def enter(self, parts: list[Part]) -> tuple[list[int], list[int]]:
        """A step's `states`, and its `kept` in one row: slots are taken for what it leaves."""
        for sequence, _ in parts:  # of a step that failed
            self.trim(sequence)
        for sequence, count in parts:
            end = sequence.num_computed + count
            ends = range(end - sequence.num_guesses, end + 1)  # which guesses are right shows later
            sequence.leaving = [(at, self._take()) for at in ends]
        states, kept, row = [], list[int](), 0
        for sequence, count in parts:
            first = sequence.num_computed
            if sequence.marks:
                self._mark(sequence, first, first + count)
            states.append(sequence.state)
            for at, slot in sequence.leaving:
                kept += (row + at - first - 1, slot)
            row += count
        return states, kept

    def _take(self) -> int:
        slots = self._pool.allocate(1)
        assert slots is not None  # there are two for each that runs
        return slots[0]

    def _mark(self, sequence: Sequence, first: int, end: int) -> None:
        """Places for what the step leaves on its way, as far as there are some."""
        on_way = sorted(mark for mark in sequence.marks if first < mark < end)
        sequence.leaving[:0] = [(mark, self._take()) for mark in on_way[: self._pool.num_available]]

    def computed(self, sequence: Sequence) -> None:
        """Its step has succeeded: what it left up to here is its own, or known. What it left beyond
        may still be, when its guesses turn out to be right.
        """
        leaving, end = sequence.leaving, sequence.num_computed
        while leaving and leaving[0][0] <= end:
            at, slot = leaving.pop(0)
            if at in sequence.marks and at < end:
                self._know(sequence, at, slot)
                self._pool.release([slot])
                continue
            if sequence.state >= 0:
                self._pool.release([sequence.state])
            sequence.state = slot
            if at % self._size == 0 and self._shares:
                self._go_on(sequence, at)

    def trim(self, sequence: Sequence) -> None:
        """Its step has left nothing more that it goes on from."""
        self._pool.release(slot for _, slot in sequence.leaving)
        sequence.leaving = []

    def most_guesses(self, running: int) -> int:
        """How many guesses each of so many that run may have: a state is left after each."""
        return self._guesses // max(running, 1)

    def _go_on(self, sequence: Sequence, end: int) -> None:
        """Its state is after a whole block: it takes the place of the one before, unless that was
        wanted for itself.
        """
        node = self._know(sequence, end, sequence.state)
        if end in sequence.marks or node is None:
            return
        before, sequence.latest = sequence.latest, node
        if before is not None and before.state >= 0 and before not in self._pinned:
            self._lose(before)

    def _know(self, sequence: Sequence, mark: int, slot: int) -> Node | None:
        """Let a slot be known by the node that it is after; that node, where it is so now."""
        node = sequence.nodes[mark // self._size - 1]
        if node.lost or node.state >= 0:
            return None
        node.state = slot
        self._after[slot] = node
        self._pool.keep(slot)
        return node

    # ── where they end ───────────────────────────────────────────────────────────────────────

    def adopt(self, sequence: Sequence, parent: Sequence) -> None:
        """Let `sequence` go on from where `parent` is."""
        if parent.state >= 0:
            self._pool.share(parent.state)
        self.let_go(sequence)
        sequence.state = parent.state

    def let_go(self, sequence: Sequence) -> None:
        """It gives back what it has."""
        held = [slot for _, slot in sequence.leaving]
        if sequence.state >= 0:
            held.append(sequence.state)
        self._pool.release(held)
        sequence.state, sequence.leaving, sequence.latest = -1, [], None
        sequence.marks = set()

    # ── what is known ────────────────────────────────────────────────────────────────────────

    def pin(self, node: Node) -> None:
        """Hold the state after a prefix that is pinned, where there is one, and room for that."""
        room = len(self._pinned) < self._most_pinned
        if node.state >= 0 and node not in self._pinned and room:
            self._pool.share(node.state)
            self._pinned[node] = node.state

    def unpin(self, node: Node) -> None:
        """Let it go like others."""
        slot = self._pinned.pop(node, None)
        if slot is not None:
            self._pool.release([slot])

    def forget(self) -> None:
        """What nobody holds becomes free."""
        self._pool.forget()

    def _lose(self, node: Node) -> None:
        """Nobody finds this node's state any more."""
        if node.state >= 0:
            slot, node.state = node.state, -1
            del self._after[slot]
            self._pool.lose(slot)

    def _evicted(self, slot: int) -> None:
        self._after.pop(slot).state = -1


def states_of(
    layout: PagedLayout, max_num_seqs: int, tree: PrefixTree | None, pins: Pins | None
) -> States | None:
    """The slots of a cache; None of one that has none. pins: which hold states, too."""
    if layout.states is None:
        return None
    held = layout.states
    states = States(held.slots, max_num_seqs, layout.block_size, tree, held.guesses)
    if pins is not None:
        pins.on_pin, pins.on_unpin = states.pin, states.unpin
    return states

"""What of a sequence's tokens the prefix tree has: held when it starts, found once computed."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.cache import BlockPool, Node, PrefixTree
from penstock.engine.layout import Ints
from penstock.engine.request import Sequence, Status
from penstock.engine.sharing import awaits, filling_beside
from penstock.engine.states import States
from penstock.engine.window import Window


class Prefixes:
    """Of a scheduler's sequences; without a tree nothing is found."""

    def __init__(
        self,
        tree: PrefixTree | None,
        pool: BlockPool,
        table: Ints,
        block_size: int,
        window: Window,
        states: States | None,
    ) -> None:
        """table [max_num_seqs, M] is the scheduler's own."""
        self._tree = tree
        self._pool = pool
        self._table = table
        self._size = block_size
        self._window = window
        self._states = states

    def cached(self, sequence: Sequence) -> list[Node]:
        """The cached prefix of a sequence; its blocks aren't held yet."""
        if self._tree is None:
            return []
        nodes = self._tree.match(sequence.keys, sequence.request.salt)
        return nodes if self._states is None else self._states.found(nodes)

    def findable(self, sequence: Sequence) -> list[Node]:
        """What of its cached prefix a sequence that is about to start may use."""
        return [] if sequence.reads_prompt else self.cached(sequence)

    def awaits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether another is just computing what `sequence` would compute next, or it is read."""
        if sequence.request.reading:
            return True
        if self._tree is None or sequence.status is Status.SWAPPED or sequence.reads_prompt:
            return False
        filling = filling_beside(sequence, running, self._size)
        if not filling:  # mostly so: nothing is looked up then
            return False
        hit = len(self.cached(sequence)) * self._size
        if self._states is not None:
            return self._states.awaits(sequence, hit, filling)
        return awaits(sequence, hit, self._size, filling)

    def hold(self, sequence: Sequence) -> int:
        """Hold the cached prefix of a sequence that is about to start; tokens found."""
        sequence.nodes = self.findable(sequence)
        sequence.blocks = self._window.found([node.block for node in sequence.nodes])
        sequence.num_computed = len(sequence.blocks) * self._size
        if self._states is not None:
            self._states.start(sequence, self._tree)
        return sequence.num_computed

    def computed(self, sequence: Sequence) -> bool:
        """More tokens of `sequence` are in the cache: full blocks become findable.

        Whether a block of it has given way to another's that holds the same.
        """
        replaced = False
        tree, size, nodes = self._tree, self._size, sequence.nodes
        if tree is None or (len(nodes) + 1) * size > sequence.num_computed:
            return False
        keys = sequence.keys
        while (len(nodes) + 1) * size <= sequence.num_computed:
            at = len(nodes)
            parent = nodes[-1] if nodes else tree.root(sequence.request.salt)
            node = tree.insert(parent, keys[at * size : (at + 1) * size], sequence.blocks[at])
            if node.block != sequence.blocks[at]:  # somebody computed the same: hold theirs
                self._pool.share(node.block)
                self._pool.release([sequence.blocks[at]])
                sequence.blocks[at] = node.block
                self._table[sequence.row, at] = node.block
                replaced = True
            nodes.append(node)
        return replaced

"""Between the prefix tree and blocks on disk: what is computed is kept, what lacks is fetched.

A prompt's blocks are fetched when it is about to start, before a step is planned, into blocks that
nobody holds; then they are in the tree, and the scheduler finds them as it finds all others. So
it knows nothing of disks, and a block that has to go again is computed or fetched once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from penstock.cache import BlockPool, Node, PrefixTree
from penstock.cache.disk import DiskStore, digest_of, root_digest
from penstock.engine.request import Sequence

logger = logging.getLogger("penstock")


class Remembering:
    """One engine's; `fetch` is called before a step is planned."""

    def __init__(
        self, store: DiskStore, tree: PrefixTree, pool: BlockPool, block_size: int
    ) -> None:
        self.store = store
        self._tree, self._pool, self._size = tree, pool, block_size
        tree.on_insert = self._keep

    def fetch(self, waiting: Iterable[Sequence], places: int, tokens: int, spare: int) -> None:
        """Fetch what those lack that start in the next step. places: rows for them; tokens: of the
        step; spare: blocks that stay free, for those that run.
        """
        for sequence in islice(waiting, places):
            request = sequence.request
            if not (request.fetched or sequence.reads_prompt or sequence.slots):
                request.fetched = True
                self._fetch(sequence, spare)
            tokens -= sequence.remaining - self._size * len(self._found(sequence))
            if tokens <= 0:
                return

    def _found(self, sequence: Sequence) -> list[Node]:
        return self._tree.match(sequence.keys, sequence.request.salt)

    def _fetch(self, sequence: Sequence, spare: int) -> None:
        keys, size = sequence.keys, self._size
        salt = sequence.request.salt
        if not isinstance(salt, str | None):  # an adapter's number, of this process alone
            return
        nodes = self._found(sequence)
        held = [self._digest(node) for node in nodes]
        first = len(nodes)
        lacking = list(self._lacking(keys[first * size :], held[-1] if held else root_digest(salt)))
        self.store.files.use([*held, *lacking])
        most = self._pool.num_available - spare - first
        found = self._read(lacking[: max(most, 0)])
        if not found:
            return
        for node in nodes:  # or the oldest of them would make room for what follows
            self._pool.share(node.block)
        blocks = self._pool.allocate(len(found))
        assert blocks is not None  # there are as many
        self.store.load(blocks, found)
        parent = nodes[-1] if nodes else self._tree.root(salt)
        for number, block in enumerate(blocks, first):
            parent = self._tree.insert(parent, keys[number * size : (number + 1) * size], block)
        self._pool.release(reversed([*(node.block for node in nodes), *blocks]))

    def _lacking(self, keys: list[int], digest: str) -> Iterator[str]:
        """Digests of the blocks that follow, as far as they are on disk, but the last token's."""
        for start in range(0, len(keys) - self._size, self._size):
            digest = digest_of(digest, keys[start : start + self._size])
            if digest not in self.store.files:
                return
            yield digest

    def _read(self, digests: list[str]) -> list[bytes]:
        """As many as are whole, one after the other. What is damaged behind the first that isn't
        there is found out too: it will be computed, and written again.
        """
        read = [self.store.files.get(digest) for digest in digests]
        return [data for data in takewhile(lambda data: data is not None, read) if data]

    def _keep(self, node: Node) -> None:
        """A block has come into the tree."""
        digest = self._digest(node)
        if digest:
            assert node.parent is not None  # a block isn't a root
            self.store.put(digest, node.block, self._digest(node.parent))

    def _digest(self, node: Node) -> str:
        """Of a node; empty for those of adapters."""
        if not node.digest:
            if node.parent is None:
                salt = self._tree.salt_of(node)
                return root_digest(salt) if isinstance(salt, str | None) else ""
            before = self._digest(node.parent)
            node.digest = before and digest_of(before, node.key)
        return node.digest

    def stats(self) -> dict[str, int]:
        """Counters of blocks."""
        files = self.store.files
        return {
            "disk_blocks": len(files),
            "disk_bytes": files.nbytes,
            "disk_blocks_read": files.read,
            "disk_blocks_written": files.written,
            "disk_blocks_dropped": files.dropped,
            "disk_blocks_damaged": files.damaged,
        }

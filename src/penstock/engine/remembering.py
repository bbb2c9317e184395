"""Between the prefix tree and blocks on disk: what is computed is kept, what lacks is fetched.

A prompt's blocks are fetched when it is about to start, before a step is planned, into blocks that
nobody holds; then they are in the tree, and the scheduler finds them as it finds all others. So
it knows nothing of disks. While there is no room for all of them, it is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from penstock.cache import BlockPool, Node, PrefixTree
from penstock.cache.disk import DiskStore, digest_of, root_digest
from penstock.engine.request import Sequence

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.options import RequestOptions

logger = logging.getLogger("penstock")

HANDS_OVER_S = 30.0
"""For which a request that ended waits until its prompt's blocks are on disk."""
LOOKS_S = 0.002  # between two looks whether they are
READ_BYTES = 32 << 20
"""Of blocks that are read between two steps, for which all others wait."""
_ADAPTERS = "of an adapter"


@dataclass(slots=True)
class Keeping:
    """A prompt whose blocks another process shall find: queued in turns, as there is room."""

    remembering: Remembering
    keys: list[int]
    salt: str | None
    left: bool = True  # something may be left to queue
    _mark: int = 0
    _written: int = -1  # blocks, when it was last looked

    @classmethod
    def of(cls, engine: Engine, tokens: Seq[int], options: RequestOptions) -> Keeping:
        """Of a request that asked to be handed over."""
        assert engine.remembering is not None  # it was checked
        checked = engine.intake.checked(tokens)
        seen = engine.intake.seen(checked, options)
        return cls(engine.remembering, checked if seen is None else seen.keys, options.cache_salt)

    def queue(self) -> None:
        """Queue what there is room for; what can't be written isn't tried for ever.

        The engine's thread's.
        """
        files = self.remembering.store.files
        self.left = self.remembering.keep(self.keys, self.salt) and files.written != self._written
        self._written, self._mark = files.written, files.mark()

    @property
    def settled(self) -> bool:
        """Whether what was queued by then was dealt with. Any thread's."""
        return self.remembering.store.files.reached(self._mark)


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

        Of large prompts a part at a time: `Request.reading` says that more comes, before which
        they don't start, and others go on.
        """
        bytes_left = READ_BYTES
        for sequence in islice(waiting, places):
            request = sequence.request
            if not (request.fetched or sequence.reads_prompt or sequence.slots):
                if bytes_left > 0:
                    bytes_left -= self._fetch(sequence, spare, bytes_left)
                else:
                    request.reading = True
            if request.reading:
                continue
            tokens -= sequence.remaining - self._size * len(self._found(sequence))
            if tokens <= 0:
                return

    def _found(self, sequence: Sequence) -> list[Node]:
        return self._tree.match(sequence.keys, sequence.request.salt)

    def _fetch(self, sequence: Sequence, spare: int, most: int) -> int:
        """Fetch about `most` bytes of what a prompt lacks; how many it was."""
        request, size, files = sequence.request, self._size, self.store.files
        salt, keys = request.salt, sequence.keys
        if not isinstance(salt, str | None):  # an adapter's number, of this process alone
            request.fetched = True
            return 0
        nodes = self._found(sequence)
        first, request.reading = len(nodes), False
        if request.read_to > first:  # some had to go again: there is no room for all
            request.fetched = True
            return 0
        held = [self._digest(node) for node in nodes]
        lacking = list(self._lacking(keys[first * size :], held[-1] if held else root_digest(salt)))
        if not request.sought:
            request.sought = True
            files.use([*held, *lacking])
            self._mend(nodes)
        room = max(self._pool.num_available - spare - first, 0)
        count = min(len(lacking), room, max(most // files.size, 1))
        found = self._read(lacking[:count])
        self._insert(sequence, nodes, found)
        if len(found) < count or count == len(lacking):
            request.fetched = True
        elif count < room:
            request.reading, request.read_to = True, first + count
        return count * files.size

    def keep(self, keys: list[int], salt: str | None) -> bool:
        """Queue what the tree has of a prompt and was left out; whether something is left.

        Of a prompt that is larger than the folder may be, nothing is.
        """
        files, nodes = self.store.files, self._tree.match(keys, salt)
        if not files.holds(len(nodes)):
            return False
        for node in nodes:
            if self._digest(node) not in files:
                if files.is_busy:
                    return True
                self._keep(node)
        return False

    def _insert(self, sequence: Sequence, nodes: list[Node], found: list[bytes]) -> None:
        """Put what was read after the blocks that there are."""
        if not found:
            return
        for node in nodes:  # or the oldest of them would make room for what follows
            self._pool.share(node.block)
        blocks = self._pool.allocate(len(found))
        assert blocks is not None  # there are as many
        self.store.load(blocks, found)
        keys, size = sequence.keys, self._size
        parent = nodes[-1] if nodes else self._tree.root(sequence.request.salt)
        for number, block in enumerate(blocks, len(nodes)):
            parent = self._tree.insert(parent, keys[number * size : (number + 1) * size], block)
        self._pool.release(reversed([*(node.block for node in nodes), *blocks]))

    def _mend(self, nodes: list[Node]) -> None:
        """Keep what is in memory and was left out when it came, for there was too much to write."""
        for node in nodes:
            if self.store.files.is_full:
                return
            self._keep(node)

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
            before = node.parent
            assert before is not None  # a block isn't a root
            self.store.put(digest, node.block, before.digest if before.parent else None)

    def _digest(self, node: Node) -> str:
        """Of a node; empty for those of adapters."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and not at.digest:
            path.append(at)
            at = at.parent
        for each in reversed(path):
            if each.parent is None:
                salt = self._tree.salt_of(each)
                each.digest = root_digest(salt) if isinstance(salt, str | None) else _ADAPTERS
            elif each.parent.digest == _ADAPTERS:
                each.digest = _ADAPTERS
            else:
                each.digest = digest_of(each.parent.digest, each.key)
        return "" if node.digest == _ADAPTERS else node.digest

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

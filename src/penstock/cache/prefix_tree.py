"""Which full blocks of tokens are in the cache, as a tree.

A node is one block: its key is the block's tokens, its parent the block before it, so the path
from a root says everything that the keys and values depend on. Roots are kept apart by a salt
(an adapter, a user).
Source: Zheng et al. 2023, arXiv:2312.07104 (RadixAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from penstock.cache.blocks import BlockPool

Key = tuple[int, ...]

NO_PREFIXES = {"prefix_hit_rate": 0.0, "prefix": {"queries": 0, "hits": 0}}
"""`PrefixTree.stats` where there is no tree."""


class Node:
    """One cached block, or a root (block −1).

    lost: its block, or one before it, has been given up, so that nobody finds it. state: the slot
    of a state after its tokens, −1 where none is known.
    """

    __slots__ = ("block", "children", "digest", "key", "lost", "parent", "state")

    def __init__(self, block: int, key: Key, parent: Node | None) -> None:
        self.block = block
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.lost = False
        self.state = -1
        self.digest = ""  # of what its path says, where somebody asks for it


class _Root(Node):
    """Where the sequences of one salt start; there is one while anything of theirs is cached."""

    __slots__ = ("salt",)

    def __init__(self, salt: Hashable) -> None:
        super().__init__(-1, (), None)
        self.salt = salt


class PrefixTree:
    """Finds the longest cached prefix of a prompt."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[Hashable, _Root] = {}
        self._nodes: dict[int, Node] = {}
        self.tokens_asked = 0
        self.tokens_hit = 0
        self.on_insert: Callable[[Node], None] = lambda node: None  # is shown every new one
        self.on_lose: Callable[[Node], None] = lambda node: None  # and each that is given up
        pool.on_evict = self._evict

    def root(self, salt: Hashable = None) -> Node:
        """Where every sequence with this salt starts, to insert a block after it.

        Forgotten with the last block below it: salts that nobody uses any more leave nothing.
        """
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Root(salt)
        return root

    def match(self, tokens: Sequence[int], salt: Hashable = None) -> list[Node]:
        """The nodes of the longest cached prefix; their blocks are not yet held.

        The last token is never part of it: its logits are wanted, so it must be computed.
        """
        found: list[Node] = []
        node: Node | None = self._roots.get(salt)
        if node is None:
            return found
        for start in range(0, len(tokens) - self._block_size, self._block_size):
            child = node.children.get(tuple(tokens[start : start + self._block_size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def count(self, asked: int, hit: int) -> None:
        """Take one prompt's lookup into the hit rate."""
        self.tokens_asked += asked
        self.tokens_hit += hit

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the cache."""
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0

    def stats(self) -> dict[str, Any]:
        """Of all lookups."""
        return {
            "prefix_hit_rate": self.hit_rate,
            "prefix": {"queries": self.tokens_asked, "hits": self.tokens_hit},
        }

    def insert(self, parent: Node, tokens: Sequence[int], block: int) -> Node:
        """The node of `tokens` after `parent`: a new one with `block`, or the one that is there.

        When another block already holds the same tokens, the caller should hold that one instead:
        their contents are equal, bit for bit. After a lost one the node is lost as well.
        """
        key = tuple(tokens)
        if parent.lost:
            lost = Node(block, key, parent)
            lost.lost = True
            return lost
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(block, key, parent)
            self._nodes[block] = node
            self._pool.keep(block)
            self.on_insert(node)
        return node

    @staticmethod
    def salt_of(root: Node) -> Hashable:
        """Whose a root is."""
        assert isinstance(root, _Root)
        return root.salt

    def _evict(self, block: int) -> None:
        node = self._nodes.pop(block)
        below = list(node.children.values())  # there are some where a window has passed it by
        while below:
            one = below.pop()
            below += one.children.values()
            one.lost, one.children = True, {}
            self.on_lose(one)
            del self._nodes[one.block]
            self._pool.lose(one.block)
        node.lost, node.children = True, {}
        self.on_lose(node)
        parent = node.parent
        assert parent is not None  # roots have no block
        del parent.children[node.key]
        if isinstance(parent, _Root) and not parent.children:
            del self._roots[parent.salt]

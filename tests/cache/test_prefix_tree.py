"""The prefix tree against an oracle that compares whole prefixes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache import BlockPool, Node, PrefixTree

SIZE, BLOCKS = 2, 9
Held = tuple[str | None, list[int], list[Node]]

# two tokens, short sequences: nearly every one shares something with another
tokens_ = st.lists(st.integers(0, 1), min_size=1, max_size=9)
salts = st.sampled_from([None, None, "adapter"])


class Tree(RuleBasedStateMachine):
    """Sequences come, take what is cached, compute the rest, and go.

    The oracle is a dictionary: (salt, whole prefix) → block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.tree = PrefixTree(self.pool, SIZE)
        evict = self.pool.on_evict

        def forget(block: int) -> None:
            gone = [key for key, value in self.cached.items() if value == block]
            assert len(gone) == 1
            salt, prefix = gone[0]
            longer = [p for s, p in self.cached if s == salt and p[: len(prefix)] == prefix]
            assert longer == [prefix]  # what continues it is gone already
            del self.cached[gone[0]]
            evict(block)

        self.pool.on_evict = forget
        self.cached: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.held: list[Held] = []

    def _prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    def _match(self, tokens: list[int], salt: str | None) -> list[int]:
        found = []
        for prefix in self._prefixes(tokens[:-1]):
            if (salt, prefix) not in self.cached:
                break
            found.append(self.cached[salt, prefix])
        return found

    @rule(tokens=tokens_, salt=salts)
    def arrive(self, tokens: list[int], salt: str | None) -> None:
        nodes = self.tree.match(tokens, salt)
        blocks = [node.block for node in nodes]
        assert blocks == self._match(tokens, salt)
        for block in blocks:
            self.pool.share(block)
        more = self.pool.allocate(-(-len(tokens) // SIZE) - len(blocks))
        if more is None:
            self.pool.release(reversed(blocks))
            return
        blocks += more
        prefixes = self._prefixes(tokens)
        for at in range(len(nodes), len(prefixes)):
            parent = nodes[-1] if nodes else self.tree.root(salt)
            node = self.tree.insert(parent, prefixes[at][-SIZE:], blocks[at])
            expected = self.cached.setdefault((salt, prefixes[at]), blocks[at])
            assert node.block == expected
            if node.block != blocks[at]:
                self.pool.share(node.block)
                self.pool.release([blocks[at]])
                blocks[at] = node.block
            nodes.append(node)
        self.held.append((salt, blocks, nodes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(reversed(self.held.pop(at)[1]))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        if not self.held:
            assert not self.cached
            assert self.pool.num_available == BLOCKS

    @invariant()
    def agrees(self) -> None:
        assert set(self.tree._nodes) == set(self.cached.values())
        assert set(self.tree._roots) == {salt for salt, _ in self.cached}
        for _, blocks, nodes in self.held:
            assert [node.block for node in nodes] == blocks[: len(nodes)]


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def _filled(tokens: list[int], blocks: int = 8) -> tuple[BlockPool, PrefixTree]:
    """A tree that holds the full blocks of `tokens`, all idle."""
    pool = BlockPool(blocks)
    tree = PrefixTree(pool, SIZE)
    node = tree.root()
    taken = pool.allocate(len(tokens) // SIZE)
    assert taken is not None
    for i, block in enumerate(taken):
        node = tree.insert(node, tokens[i * SIZE : (i + 1) * SIZE], block)
    pool.release(reversed(taken))
    return pool, tree


def test_the_last_token_is_never_part_of_a_match() -> None:
    _, tree = _filled([1, 2, 3, 4])
    assert len(tree.match([1, 2, 3, 4])) == 1  # the fourth token's logits are wanted
    assert len(tree.match([1, 2, 3, 4, 5])) == 2
    assert tree.match([1, 2]) == []
    assert tree.match([]) == []


def test_equal_blocks_after_other_beginnings_are_other_nodes() -> None:
    _, tree = _filled([1, 2, 3, 4])
    assert tree.match([3, 4, 0]) == []
    assert tree.match([1, 3, 3, 4, 0]) == []


def test_salts_are_kept_apart() -> None:
    _, tree = _filled([1, 2])
    assert len(tree.match([1, 2, 3])) == 1
    assert tree.match([1, 2, 3], "adapter") == []


def test_the_longest_unused_is_given_up_first() -> None:
    pool, tree = _filled([1, 2, 3, 4], blocks=2)
    kept = tree.match([1, 2, 0])[0].block
    pool.allocate(1)
    assert [node.block for node in tree.match([1, 2, 3, 4, 0])] == [kept]


def test_hit_rate() -> None:
    _, tree = _filled([1, 2])
    assert tree.hit_rate == 0.0
    tree.count(asked=30, hit=0)
    tree.count(asked=10, hit=8)
    assert (tree.tokens_asked, tree.tokens_hit, tree.hit_rate) == (40, 8, 0.2)

"""The block pool against an oracle that keeps lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache import BlockPool
from penstock.errors import PenstockError

SIZE = 7


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.holds: list[int] = []  # a block as often as it is held
        self.idle: list[int] = []  # oldest first
        self.known: set[int] = set()
        self.expected_evictions: list[int] = []

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        free = set(range(SIZE)) - set(self.holds) - set(self.idle)
        blocks = self.pool.allocate(count)
        if count > len(free) + len(self.idle):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        taken = self.idle[: max(0, count - len(free))]  # only when nothing is free
        assert set(blocks) & set(self.idle) == set(taken)
        self.idle = self.idle[len(taken) :]
        self.known -= set(taken)
        self.expected_evictions += taken
        assert not set(blocks) & set(self.holds)
        self.holds += blocks

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.release([block])
        self.holds.remove(block)
        if block not in self.holds and block in self.known:
            self.idle.append(block)

    @precondition(lambda self: self.holds or self.idle)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds + self.idle))
        self.pool.share(block)
        self.holds.append(block)
        self.idle = [b for b in self.idle if b != block]

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.keep(block)
        self.known.add(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.expected_evictions += self.idle
        self.known -= set(self.idle)
        self.idle = []

    @rule(block=st.integers(0, SIZE - 1))
    def misuse(self, block: int) -> None:
        if block not in self.holds:
            with pytest.raises(PenstockError, match=f"Block {block} was released more often"):
                self.pool.release([block])
            if block not in self.idle:
                with pytest.raises(PenstockError, match=f"Block {block} is free"):
                    self.pool.share(block)

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert [pool.count(b) for b in range(SIZE)] == [self.holds.count(b) for b in range(SIZE)]
        assert pool.num_used == len(set(self.holds))
        assert pool.num_idle == len(self.idle)
        assert pool.num_available == SIZE - len(set(self.holds))
        assert self.evicted == self.expected_evictions


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert pool.num_available == 1


def test_double_release_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.release([block])
    with pytest.raises(PenstockError, match="released more often than it was held"):
        pool.release([block])
    assert pool.num_available == 2
    assert pool.count(block) == 0

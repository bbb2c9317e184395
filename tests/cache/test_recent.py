"""Places of recent tokens: given when a block is begun, taken back when nobody can see it so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.cache import PagedLayout, RecentBlocks, most_recent_blocks
from penstock.errors import OutOfCacheError, PenstockError
from penstock.ops.kivi import recent_from
from penstock.step import KV, Step

WINDOW, BLOCK = 64, 32


def cache(blocks: int, places: int, window: int = WINDOW, size: int = BLOCK) -> KV:
    return PagedLayout(((1, 16), (2, 32)), torch.uint8, size, window, places).allocate(blocks)


def step(*sequences: tuple[list[int], int, int]) -> Step:
    """Of (blocks, first position, count); only what `RecentBlocks` reads is right."""
    width = max(len(blocks) for blocks, _, _ in sequences)
    table = [blocks + [0] * (width - len(blocks)) for blocks, _, _ in sequences]
    starts = np.cumsum([0, *(count for _, _, count in sequences)]).tolist()
    lengths = [first + count for _, first, count in sequences]
    none = torch.zeros(starts[-1], dtype=torch.int32)
    return Step(
        none, none, none,
        *(torch.tensor(x, dtype=torch.int32) for x in (starts, lengths, table)),
        none,
    )  # fmt: skip


def run(recent: RecentBlocks, *sequences: tuple[list[int], int, int]) -> None:
    one = step(*sequences)
    recent.enter(one)
    recent.leave(one)


def test_a_query_sees_at_least_the_window_and_less_than_a_group_more() -> None:
    for window in (1, 32, 100, 128):
        for position in range(700):
            first = recent_from(position, window)
            assert first % 32 == 0
            assert first == 0 or window < position + 1 - first <= window + 32
    assert [recent_from(p, 128) for p in (0, 159, 160, 191, 192)] == [0, 0, 32, 32, 64]


def test_places_follow_a_sequence() -> None:
    kv = cache(16, 6)
    places = kv[0][6]
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    blocks = [7, 3, 9, 1, 8, 2]
    run(recent, (blocks, 0, 70))
    assert (places >= 0).nonzero().flatten().tolist() == [3, 7, 9]
    for position in range(70, 180):
        run(recent, (blocks, position, 1))
        seen = blocks[recent_from(position + 1, WINDOW) // BLOCK : position // BLOCK + 1]
        assert (places >= 0).nonzero().flatten().tolist() == sorted(seen)
    assert recent.num_used == 3
    assert kv[1][6] is places  # the same in every layer


def test_places_are_those_of_all_windows() -> None:
    """Of sequences of different lengths in tables of one width, some without a query."""
    draw = np.random.default_rng(0)
    kv = cache(60, 60)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    tables = draw.permutation(60).reshape(6, 10).tolist()
    done = [0] * 6
    while min(done) < 300:
        counts = [min(int(draw.choice([0, 1, 40])), 320 - at) for at in done]
        run(recent, *zip(tables, done, counts, strict=True))
        done = [at + count for at, count in zip(done, counts, strict=True)]
        seen = {
            block
            for blocks, at in zip(tables, done, strict=True)
            for block in blocks[recent_from(at, WINDOW) // BLOCK : -(-at // BLOCK)]
        }
        assert set((kv[0][6] >= 0).nonzero().flatten().tolist()) == seen


def test_a_sequence_sees_what_another_begins_in_the_same_step() -> None:
    kv = cache(8, 8)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    recent.holders = {0: 2, 1: 2, 2: 1, 3: 1}.__getitem__
    run(recent, ([0, 1, 2], 0, 66), ([0, 1, 3], 64, 1))
    assert (kv[0][6] >= 0).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert recent.num_used == 4


def test_a_place_lasts_while_a_block_is_shared() -> None:
    kv = cache(16, 16)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    holders = dict.fromkeys(range(16), 1)
    recent.holders = holders.__getitem__
    run(recent, ([0, 1, 2], 0, 96))
    holders |= {0: 2, 1: 2, 2: 2}  # a second sample of the same prompt
    run(recent, ([0, 1, 2, 3, 4, 5], 96, 90))  # the first has left them
    assert all(kv[0][6][block] >= 0 for block in (1, 2))
    run(recent, ([0, 1, 2, 6], 96, 1))  # the second still sees the last
    holders |= {0: 1, 1: 1, 2: 1}
    run(recent, ([0, 1, 2, 3, 4, 5], 186, 1))
    assert all(kv[0][6][block] < 0 for block in (0, 1, 2))


def test_a_place_ends_when_all_that_share_its_block_leave_it_together() -> None:
    """As beams do, which come to share for ever what one of them has computed."""
    kv = cache(16, 16)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    holders = dict.fromkeys(range(16), 1)
    recent.holders = holders.__getitem__
    run(recent, ([0, 1, 2], 0, 90))
    holders |= {0: 2, 1: 2}
    places = kv[0][6]
    recent.copy([(2, 3)])
    run(recent, ([0, 1, 2], 90, 6), ([0, 1, 3], 90, 6))
    assert (places >= 0).nonzero().flatten().tolist() == [1, 2, 3]
    run(recent, ([0, 1, 2, 4], 96, 39))  # the other takes no part, and will still see block 1
    run(recent, ([0, 1, 2, 4], 135, 1), ([0, 1, 3, 5], 96, 1))  # it does, and will see it again
    assert (places >= 0).nonzero().flatten().tolist() == [1, 2, 3, 4, 5]
    run(recent, ([0, 1, 2, 4], 136, 1), ([0, 1, 3, 5], 97, 40))
    assert (places >= 0).nonzero().flatten().tolist() == [2, 3, 4, 5]


def test_what_was_let_go_is_found_when_it_is_needed() -> None:
    kv = cache(16, 4)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    held = {0, 1, 2, 3}
    recent.holders = lambda block: int(block in held)
    run(recent, ([0, 1, 2, 3], 0, 128))
    held.clear()
    held |= {8, 9, 10, 11}
    run(recent, ([8, 9, 10, 11], 0, 128))
    assert (kv[0][6] >= 0).nonzero().flatten().tolist() == [10, 11]
    held |= {0, 1, 2}
    with pytest.raises(OutOfCacheError, match="All 4 blocks of recent tokens are in use"):
        run(recent, ([8, 9, 10, 11, 12], 128, 1), ([0, 1, 2], 0, 96))


def test_a_block_that_is_begun_again_keeps_its_place() -> None:
    kv = cache(4, 2)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    for _ in range(5):  # the sequence starts over in the same blocks; nobody says so
        run(recent, ([2, 3], 0, 40))
    assert recent.num_used == 2


def test_nobody_enters_in_the_middle() -> None:
    recent = RecentBlocks(cache(8, 8), WINDOW, BLOCK)
    with pytest.raises(
        PenstockError, match=r"position 96 sees the tokens from 32 on .* only their"
    ):
        recent.enter(step(([0, 1, 2, 3], 96, 4)))


def test_copies_have_places_of_their_own() -> None:
    kv = cache(8, 4)
    recent = RecentBlocks(kv, WINDOW, BLOCK)
    run(recent, ([5], 0, 20), ([6], 0, 9))
    places = kv[0][6]
    for layer in kv:
        for part in layer[4:6]:
            part[places[5]], part[places[6]] = 1.0, 2.0
    recent.copy([(5, 6), (6, 2), (1, 3)])  # at once; 1 was never begun
    for layer in kv:
        for part in layer[4:6]:
            assert [part[places[b]].unique().tolist() for b in (5, 6, 2)] == [[1.0], [1.0], [2.0]]
    assert places[3] < 0
    assert len({int(places[b]) for b in (5, 6, 2)}) == 3


@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("window", [1, 48, 128])
@pytest.mark.parametrize("budget", [8, 200])
def test_the_most_that_can_be_needed_is(size: int, window: int, budget: int) -> None:
    """Sequences come and go, in chunks and token by token, and never lack a place."""
    draw = np.random.default_rng(size + window + budget)
    length, seqs = 500, 8
    most = most_recent_blocks(window, size, length, seqs, budget)
    width = -(-length // size)
    kv = cache(seqs * width, most, window, size)
    recent = RecentBlocks(kv, window, size)
    held: set[int] = set()
    recent.holders = lambda block: int(block in held)
    running: dict[int, tuple[list[int], int]] = {}
    for _ in range(600):
        if len(running) < seqs and draw.random() < 0.3:
            row = next(i for i in range(seqs) if i not in running)
            running[row] = ([row * width + i for i in draw.permutation(width).tolist()], 0)
        left, parts = budget, []
        for row, (blocks, done) in list(running.items()):
            count = min(left, length - done, int(draw.choice([1, 1, 7, 90])))
            if count <= 0 or draw.random() < 0.2:
                continue
            held |= set(blocks[: -(-(done + count) // size)])
            parts.append((blocks, done, count))
            running[row] = (blocks, done + count)
            left -= count
        if parts:
            run(recent, *parts)
        for row, (blocks, done) in list(running.items()):
            if done == length or draw.random() < 0.02:
                held -= set(blocks)
                del running[row]

"""The swap space: slots are counted, and bytes come back as they went."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.cache import PagedLayout, SwapSpace, SwapStore
from penstock.errors import PenstockError


def test_slots_are_given_all_or_none() -> None:
    space = SwapSpace(5)
    first = space.allocate(3)
    assert first is not None and sorted(first) == [0, 1, 2]  # low ones first: memory is taken so
    assert space.allocate(3) is None
    assert (space.num_used, space.num_available) == (3, 2)
    space.release(first)
    assert sorted(space.allocate(5) or []) == [0, 1, 2, 3, 4]


def test_a_shared_slot_is_free_after_its_last_holder() -> None:
    space = SwapSpace(1)
    (slot,) = space.allocate(1) or []
    space.share(slot)
    space.release([slot])
    assert (space.count(slot), space.num_available) == (1, 0)
    space.release([slot])
    assert space.num_available == 1
    with pytest.raises(PenstockError, match="Slot 0 was released more often"):
        space.release([slot])
    with pytest.raises(PenstockError, match="Slot 0 is free"):
        space.share(slot)


def test_a_space_of_nothing() -> None:
    assert SwapSpace(0).allocate(1) is None
    assert SwapSpace(0).allocate(0) == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_the_same_bytes_come_back(dtype: torch.dtype) -> None:
    """Of every layer, with the scales of int8, across several growths; NaNs too."""
    layout = PagedLayout(((2, 16), (1, 48)), dtype, 32)
    kv = layout.allocate(90)
    generator = torch.Generator().manual_seed(0)
    parts = [part.view(torch.uint8) for layer in kv for part in layer]
    for part in parts:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator))
    before = [part.clone() for part in parts]
    store = SwapStore(kv)
    assert store.nbytes == 0
    blocks, slots = random.Random(1).sample(range(90), 70), random.Random(2).sample(range(70), 70)
    store.put(list(zip(blocks[:30], slots[:30], strict=True)))
    store.put(list(zip(blocks[30:], slots[30:], strict=True)))
    assert 70 * layout.bytes_per_block <= store.nbytes <= 128 * layout.bytes_per_block
    for part in parts:
        part.fill_(7)
    elsewhere = random.Random(3).sample(range(90), 70)
    store.take(list(zip(slots, elsewhere, strict=True)))
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[elsewhere], was[blocks])
        untouched = sorted(set(range(90)) - set(elsewhere))
        assert (part[untouched] == 7).all()


def test_a_slot_can_be_read_into_two_blocks() -> None:
    kv = [(torch.arange(8.0).view(4, 2), torch.zeros(4, 0))]
    store = SwapStore(kv)
    store.put([(1, 0)])
    store.take([(0, 2), (0, 3)])
    assert kv[0][0].tolist() == [[0.0, 1.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0]]


def test_what_was_never_written_is_not_read() -> None:
    store = SwapStore([(torch.zeros(4, 2),)])
    with pytest.raises(PenstockError, match="never written"):
        store.take([(0, 1)])

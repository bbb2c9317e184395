"""The paged layout: its size, and copies of its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.cache import PagedLayout, PagedRows, block_rows, copy_blocks


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8],
    ids=str,
)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("heads", [((2, 64),), ((1, 16), (3, 48)), ((2, 8), (1, 100))])
def test_bytes_per_block(
    dtype: torch.dtype, block_size: int, heads: tuple[tuple[int, int], ...]
) -> None:
    layout = PagedLayout(heads, dtype, block_size)
    kv = layout.allocate(5)
    assert len(kv) == len(heads)
    assert sum(part.nbytes for layer in kv for part in layer) == 5 * layout.bytes_per_block


def test_bytes_per_block_by_hand() -> None:
    # 32 tokens, keys and values, 2 heads of 64 in bfloat16, and 1 of 20 padded to 32
    assert PagedLayout(((2, 64), (1, 20)), torch.bfloat16, 32).bytes_per_block == 32 * 2 * 2 * 160
    # of four bits, each with two float16 for every 32 dimensions: 5 bits a value
    assert PagedLayout(((2, 64), (1, 20)), torch.uint8, 32).bytes_per_block == 32 * 2 * 160 * 5 // 8


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (320, 10)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert PagedLayout(((1, 16),), torch.float32, 32).blocks_for(tokens) == blocks


def test_the_cache_starts_as_zeros() -> None:
    for pair in PagedLayout(((1, 16),), torch.float32, 32).allocate(3):
        for tensor in pair:
            assert not tensor.any()


def _filled(blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    kv = PagedLayout(((1, 16), (2, 32)), torch.bfloat16, 32).allocate(blocks)
    for keys, values in kv:
        for i in range(blocks):
            keys[i], values[i] = i + 1, -(i + 1)
    return kv


def test_copy_blocks() -> None:
    kv = _filled(6)
    copy_blocks(block_rows(kv), [(0, 4), (0, 5), (2, 1)])
    for keys, values in kv:
        assert [block.unique().tolist() for block in keys] == [[1], [3], [3], [4], [1], [1]]
        assert [block.unique().tolist() for block in values] == [[-1], [-3], [-3], [-4], [-1], [-1]]


def test_copies_happen_at_once() -> None:
    """A source that is itself a target is read before it is written: its holder was preempted."""
    kv = _filled(3)
    copy_blocks(block_rows(kv), [(0, 1), (1, 2)])
    for keys, _ in kv:
        assert [block.unique().tolist() for block in keys] == [[1], [1], [2]]


def test_no_copies() -> None:
    kv = _filled(2)
    copy_blocks(block_rows(kv), [])
    assert [block.unique().tolist() for block in kv[0][0]] == [[1], [2]]


@pytest.mark.parametrize("blocks", [1, 3, 4, 50])
@pytest.mark.parametrize("block_size", [32, 96])
def test_bytes_of_a_cache_with_a_window(blocks: int, block_size: int) -> None:
    """All that is allocated, each tensor once; at most 3 blocks of recent tokens."""
    layout = PagedLayout(((2, 64), (1, 20)), torch.uint8, block_size, 128, 3)
    kv = layout.allocate(blocks)
    each = {part.data_ptr(): part.nbytes for layer in kv for part in layer}
    assert sum(each.values()) == layout.nbytes(blocks)
    assert [part.shape[0] for part in kv[0][4:6]] == [min(blocks, 3)] * 2
    recent = sum(part.nbytes for part in kv[1][4:6])
    assert recent == min(blocks, 3) * block_size * layout.recent_bytes_per_token(1)
    codes = sum(part.nbytes for part in kv[0][:4])
    assert codes == blocks * block_size * layout.bytes_per_token(0)


@pytest.mark.parametrize("window", [0, 128])
def test_as_many_blocks_as_fit(window: int) -> None:
    dtype = torch.uint8 if window else torch.bfloat16
    layout = PagedLayout(((2, 64),), dtype, 32, window, 7 if window else 0)
    for blocks in range(30):
        size = layout.nbytes(blocks)
        assert layout.blocks_in(size) == blocks
        if blocks:
            assert layout.blocks_in(size - 1) == blocks - 1
            assert layout.blocks_in(size + 1) == blocks


def test_recent_tokens_are_not_copied_with_the_blocks() -> None:
    kv = PagedLayout(((1, 16),), torch.uint8, 32, 64, 3).allocate(4)
    for part in kv[0][:6]:
        part[1] = 7
    copy_blocks(block_rows(kv), [(1, 2)])
    assert all(bool((part[2] == 7).all()) for part in kv[0][:4])
    assert not any(bool(part[2].any()) for part in kv[0][4:6])


def test_memory_is_taken_as_it_is_written() -> None:
    """Two gigabytes of cache are there at once, are zero, and take no room until then."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    layout = PagedLayout(((8, 128),), torch.bfloat16, 32)
    kv = layout.allocate((2 << 30) // layout.bytes_per_block)
    assert resident() - before < 256 << 20
    key = kv[0][0]
    assert key.nbytes == 1 << 30 and int(key[-1].count_nonzero()) == 0
    key[5] = 1
    assert bool((key[5] == 1).all()) and int(key[6].count_nonzero()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8], ids=str)
def test_a_block_lies_in_one_piece(dtype: torch.dtype) -> None:
    """What all layers have of it is side by side: a first token takes a page, not one a layer."""
    layout = PagedLayout(((2, 64), (1, 20), (3, 16)), dtype, 32)
    parts = [part for layer in layout.allocate(7) for part in layer]
    for block in (0, 6):
        places = sorted((part[block].data_ptr(), part[block].nbytes) for part in parts)
        ends = [at + size for at, size in places]
        assert [at for at, _ in places[1:]] == ends[:-1]
        assert ends[-1] - places[0][0] == layout.bytes_per_block
        assert places[0][0] - parts[0].data_ptr() == block * layout.bytes_per_block


def test_rows_of_blocks() -> None:
    """One piece for all layers; layers of another cache, or some of one, are found too."""
    layout = PagedLayout(((2, 64), (1, 20), (3, 16)), torch.int8, 32)
    kv = layout.allocate(7)
    [rows] = block_rows(kv)
    assert rows.shape == (7, layout.bytes_per_block // 8)
    rows[3] = -1
    for part in (part for layer in kv for part in layer):
        assert (part.view(torch.uint8)[3] == 255).all()
        assert not part.view(torch.uint8)[[2, 4]].any()
    [first] = block_rows(kv[:1])
    last = PagedLayout(((3, 16),), torch.int8, 32).bytes_per_block // 8
    assert [len(first[0]), *(len(r[0]) for r in block_rows([kv[0], kv[2]]))] == [
        len(first[0]), len(first[0]), last,
    ]  # fmt: skip
    assert len(block_rows([*kv, *layout.allocate(7)])) == 2
    assert len(block_rows(PagedRows(((2, 64), (1, 20)), torch.int8, 32).allocate(7))) == 8
    assert len(block_rows(PagedLayout(((1, 16),), torch.uint8, 32, 64, 3).allocate(4))) == 1

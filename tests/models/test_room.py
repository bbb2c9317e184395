"""Parts of a matrix, joined in memory that is used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.models.room import SMALL, Room

ROWS = SMALL // (64 * 2)  # of 64 bfloat16: more than SMALL together


def parts(*rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 64, generator=made).to(dtype) for n in rows]


def test_joined_as_torch_joins_them() -> None:
    room = Room()
    for seed, rows in enumerate([(ROWS, 5), (ROWS, ROWS, 3), (1, ROWS), (4, 4), (2 * ROWS, ROWS)]):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            given = parts(*rows, seed=seed, dtype=dtype)
            assert torch.equal(room.join(given), torch.cat(given))


def test_the_same_memory_again() -> None:
    room = Room()
    first = room.join(parts(ROWS, ROWS))
    again = room.join(parts(ROWS, 7, seed=1))
    assert again.data_ptr() == first.data_ptr()
    few = room.join(parts(2, 2))
    assert few.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_module_keeps_what_it_keeps(buffer: bool, skipped: int) -> None:
    """And no more than that: a part of what was joined is copied out."""
    room, module, given = Room(), nn.Module(), parts(ROWS, 5)
    kept = room.join(given)[skipped:]
    if buffer:
        module.register_buffer("table", kept)
    else:
        module.table = nn.Parameter(kept, requires_grad=False)
    room.leave_to(module)
    assert module.table.untyped_storage().nbytes() == module.table.nbytes
    room.join(parts(ROWS, 5, seed=1))
    assert torch.equal(module.table, torch.cat(given)[skipped:])


def test_memory_stays_where_a_module_has_a_copy() -> None:
    room, module = Room(), nn.Linear(64, 64)
    joined = room.join(parts(ROWS, 5))
    room.leave_to(module)
    assert room.join(parts(ROWS, 5)).data_ptr() == joined.data_ptr()


@pytest.mark.parametrize(
    "given",
    [
        [torch.zeros(ROWS, 64), torch.zeros(ROWS, 65)],
        [torch.zeros(ROWS, 64), torch.zeros(ROWS * 64)],
        [torch.zeros(ROWS, 64), torch.zeros(())],
    ],
)
def test_parts_that_do_not_fit(given: list[Tensor]) -> None:
    with pytest.raises(RuntimeError):
        Room().join(given)


def test_parts_of_two_dtypes() -> None:
    """As torch widens them."""
    given = [torch.ones(ROWS, 64), torch.ones(ROWS, 64, dtype=torch.bfloat16)]
    joined = Room().join(given)
    assert joined.dtype is torch.float32 and torch.equal(joined, torch.cat(given))

"""Ranks that are threads here: what each has a part of is everybody's, whoever came first."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.ops.panels import pack_panels
from penstock.ops.ranks import HEADER

WAYS = ["reference", *["native"] * (native.handle is not None)]


def meeting_of(place_bytes: int) -> Tensor:
    return torch.zeros(HEADER + 2 * place_bytes, dtype=torch.uint8)


def of_all(ranks: int, call: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(call, range(ranks)))


def way(name: str, which: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = ops.implementations(name)[which]
    return found


@pytest.mark.parametrize("which", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(0, 32), (0, 16, 48), (0, 7, 8, 40)])
def test_columns_of_all_ranks(which: str, dtype: torch.dtype, ends: tuple[int, ...]) -> None:
    """Rows that need one meeting, several, and none; strided ones; one meeting after another."""
    ranks, gather = len(ends) - 1, way("gather_columns", which)
    bounds = torch.tensor(ends, dtype=torch.int32)
    meeting = meeting_of(3 * ends[-1] * dtype.itemsize // 64 * 64 + 64)
    whole = [torch.randn(rows, ends[-1]).to(dtype) for rows in (1, 11, 0, 4, 1, 2)]

    def rank(number: int) -> Tensor:
        found = []
        for turn, x in enumerate(whole):
            if number == turn % ranks:
                time.sleep(0.01)  # longer than others look for it without rest
            own = x[:, ends[number] : ends[number + 1]]
            found.append(gather(own, meeting, bounds, number))
        return torch.cat(found)

    for found in of_all(ranks, rank):
        assert torch.equal(found, torch.cat(whole))


@pytest.mark.parametrize("which", WAYS)
def test_columns_for_one_reader(which: str) -> None:
    ends, gather = (0, 16, 32), way("gather_columns", which)
    bounds, meeting = torch.tensor(ends, dtype=torch.int32), meeting_of(256)
    x = torch.randn(9, 32)

    def rank(number: int) -> Tensor:
        own = x[:, ends[number] : ends[number + 1]]
        return gather(own, meeting, bounds, number, 1)

    assert torch.equal(of_all(2, rank)[1], x)


@pytest.mark.parametrize("which", WAYS)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_table_in_parts(which: str, packed: bool) -> None:
    """The same as of the whole table, wherever ids are."""
    ends = (0, 32, 80, 100)
    table = torch.randn(100, 24).to(torch.bfloat16)
    parts = [table[a:b] for a, b in pairwise(ends)]
    if packed:
        parts = [pack_panels(part) for part in parts]
    tokens = torch.randint(0, 100, (37,), dtype=torch.int32)
    bounds, meeting = torch.tensor(ends, dtype=torch.int32), meeting_of(512)
    gather = way("gather_embedding", which)

    def rank(number: int) -> Tensor:
        return gather(
            tokens, parts[number], 24, 1.5, None, None, 0, None, meeting, bounds, number
        )  # fmt: skip

    want = ops.op("embedding").reference(tokens, table, 24, 1.5)
    for found in of_all(3, rank):
        assert torch.equal(found, want)


@pytest.mark.parametrize("which", WAYS)
def test_a_rank_that_has_gone(which: str) -> None:
    """Whoever waits for it is told, instead of waiting for ever."""
    meeting = meeting_of(256)
    bounds = torch.tensor([0, 16, 32], dtype=torch.int32)
    gather = way("gather_columns", which)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(gather, torch.zeros(1, 16), meeting, bounds, 0)
        time.sleep(0.05)
        assert not waits.done()
        meeting[:4].view(torch.int32)[0] = 1
        with pytest.raises(RuntimeError, match="another rank of this step has gone"):
            waits.result(5)


@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_arguments_that_do_not_fit() -> None:
    bounds, meeting = torch.tensor([0, 16, 32], dtype=torch.int32), meeting_of(256)
    x = torch.zeros(1, 16)
    with pytest.raises(RuntimeError, match="rank 0 has 16 columns, x 15"):
        ops.gather_columns(x[:, 1:], meeting, bounds, 0)
    with pytest.raises(RuntimeError, match="doesn't fit in a meeting's place of 64"):
        ops.gather_columns(x, meeting[: HEADER + 128], bounds, 0)
    with pytest.raises(RuntimeError, match="rank 2 of 2"):
        ops.gather_columns(x, meeting, bounds, 2)
    with pytest.raises(RuntimeError, match="bounds must not fall"):
        ops.gather_columns(x, meeting, torch.tensor([0, 16, 8], dtype=torch.int32), 0)
    with pytest.raises(RuntimeError, match="token 32 is outside the table of 32"):
        ops.gather_embedding(
            torch.tensor([32], dtype=torch.int32), torch.zeros(16, 4), 4, 1.0, None, None, 0, None,
            meeting, bounds, 0,
        )  # fmt: skip

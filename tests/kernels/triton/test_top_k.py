from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.triton import launchers, top_k
from tests.kernels.triton.conftest import DEVICE, reference
from tests.kernels.triton.logits import awkward, inf, nan, normal, peaked, same

op = launchers()
pytestmark = pytest.mark.filterwarnings(  # of NumPy, in the interpreter: inf - inf and 0 / 0
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)


def check(logits: Tensor, k: int) -> None:
    for found, expected in zip(op["top_k"](logits, k), reference("top_k")(logits, k), strict=True):
        same(found, expected)


@pytest.mark.parametrize("size", [1, 300, 5000])
@pytest.mark.parametrize("k", [1, 20, 128])
def test_the_largest_in_order(size: int, k: int) -> None:
    check(awkward(size), k)


def test_a_thousand() -> None:
    """Of rows with few candidates, of a flat one that one program settles, and of a short one."""
    rows = awkward(5000)
    check(rows[[0, 2]], 1000)
    check(rows[:, :1500][[1]], 1024)


@pytest.mark.parametrize("k", [1025, 4000, 5000])
def test_more_than_are_chosen_here(k: int) -> None:
    check(awkward(5000), k)


@pytest.mark.parametrize("spread", [1e-6, 0.1, 1e4])
@pytest.mark.parametrize("shift", [0.0, -60.0, 900.0])
def test_any_distribution(spread: float, shift: float) -> None:
    check(normal(2, 5000, spread=spread) + shift, 100)


def test_bins_have_the_order_of_floats() -> None:
    """By the bounds that the histogram gives: every candidate that is needed is among them."""
    edges = torch.tensor([2.0**n for n in range(-9, 13)])
    values = torch.cat((edges, edges * 1.02, -edges, -edges * 1.02, torch.zeros(1)))
    logits = values.repeat(60)[None].to(DEVICE)  # 5,340 of them
    for k in (1, 60, 61, 900):
        check(logits, k)


@pytest.mark.parametrize("k", [1, 60, 100, 128, 1024])
def test_masks_that_leave_many_tokens_in_few_groups(k: int) -> None:
    """One block of 4,096 is 64 groups: a mask over neighbours leaves more tokens than there is room
    for candidates in fewer groups than k. Other rows must not notice.
    """
    size, left = 9000, 4096
    rows = torch.full((7, size), -inf, device=DEVICE)
    rows[0, :left] = normal(1, left)[0]
    rows[1] = normal(1, size, seed=1)[0]
    rows[2, left : left + 4000] = -2.5  # that are all equal
    rows[3, 17 : 17 + k + 1] = normal(1, k + 1)[0]  # one more than is looked for
    rows[4, 17 : 17 + max(k - 1, 1)] = 1e-30  # one less
    rows[5] = 0.25
    rows[6, :left] = normal(1, left)[0].round()
    rows[6, 5] = nan
    check(rows if k < 1024 else rows[[0, 2]], k)


def test_shares_of_the_whole_row() -> None:
    logits = torch.cat((awkward(5000), peaked(5000)))
    for temperature, k in ((0.7, 50), (1.0, 2000)):
        t = torch.full((len(logits), 1), temperature, device=DEVICE)
        found = op["softmax_top_k"](logits, t, k)
        expected = reference("softmax_top_k")(logits, t, k)
        same(found[0], expected[0])
        same(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2], rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("size", [1, 130, 300])
def test_scaled_and_cut(size: int) -> None:
    logits = torch.cat((awkward(size)[::2], peaked(size)))
    rows = len(logits)
    for temperature, most, min_p in ((0.7, 40, 0.0), (1.3, size, 0.05), (3.0, 3, 0.5)):
        t = torch.full((rows, 1), temperature, device=DEVICE)
        k = torch.full((rows, 1), min(most, size), device=DEVICE)
        call = (logits, t, k, torch.full_like(t, min_p).log(), 128)
        wanted = reference("scaled_top_k")(*call)
        for found, expected in zip(op["scaled_top_k"](*call), wanted, strict=True):
            same(found, expected)


def test_a_row_is_the_same_alone_and_anywhere() -> None:
    logits = torch.cat((awkward(5000)[[0, 1, 5, 11]], peaked(5000)[2:4]))
    t = torch.linspace(0.3, 2.0, len(logits), device=DEVICE)
    together = op["softmax_top_k"](logits, t, 40)
    wide = torch.full((len(logits), 5031), 50.0, device=DEVICE)
    wide[:, 17:5017] = logits
    alone = [
        op["softmax_top_k"](wide[i : i + 1, 17:5017], t[i : i + 1], 40) for i in range(len(logits))
    ]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        same(whole, torch.cat(parts))


def test_no_rows() -> None:
    empty, none = torch.empty(0, 700, device=DEVICE), torch.empty(0, device=DEVICE)
    assert [one.shape for one in op["top_k"](empty, 5)] == [(0, 5), (0, 5)]
    assert [one.shape for one in op["softmax_top_k"](empty, none, 5)] == [(0, 5)] * 3
    found = op["scaled_top_k"](empty, none, none.long(), none, 5)
    assert [one.shape for one in found] == [(0, 5), (0, 5), (0,), (0,)]


def test_groups_are_twice_as_many_as_are_looked_for() -> None:
    for size in (1, 50, 4097, 5000, 151_936, 262_144):
        for k in (1, 128, 1024):
            group = top_k._group(size, min(k, size))
            assert group == 1 or size // group >= 2 * min(k, size)

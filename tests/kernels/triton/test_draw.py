from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from penstock.kernels.triton import launchers
from penstock.ops.draw import BEYOND, NO_DRAW
from tests.kernels.triton.conftest import DEVICE, reference
from tests.kernels.triton.logits import (
    awkward,
    fractions,
    inf,
    nan,
    normal,
    peaked,
    same,
)

op = launchers()
pytestmark = pytest.mark.filterwarnings(  # of NumPy, in the interpreter: inf - inf and 0 / 0
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)


def column(rows: int, value: float) -> Tensor:
    return torch.full((rows, 1), value, device=DEVICE)


@pytest.mark.parametrize("k", [1, 50, 300])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.95, 1.0])
def test_from_candidates(k: int, top_p: float | None) -> None:
    """Most wide ones beside many that are nothing, whole halves and no weight at all."""
    weights = normal(12, k).mul_(2.0).softmax(-1)
    weights[3], weights[4, 1:], weights[5] = 0.25, 0.0, 0.0
    weights = weights.sort(dim=-1, descending=True).values
    ids = torch.stack([torch.randperm(5000)[:k] for _ in range(12)]).to(DEVICE)
    u = fractions(12)
    p = None if top_p is None else column(12, top_p)
    expected = reference("draw_from")(ids, weights, u, p)
    same(op["draw_from"](ids, weights, u, p), expected)
    assert expected[5] == NO_DRAW


def test_from_candidates_by_hand() -> None:
    ids = torch.tensor([[9, 3, 7, 5]] * 9, device=DEVICE)
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.0]] * 6 + [[0.0] * 4] * 3, device=DEVICE)
    weights[5, 1], weights[7, 2], weights[8, 0] = nan, inf, 1.0
    u = torch.tensor([0.0, 0.49, 0.51, 0.76, 1.0, 0.5, 0.5, 0.1, 0.99], dtype=torch.float64)
    found = op["draw_from"](ids, weights, u.to(DEVICE))
    assert found.tolist() == [3, 3, 7, 9, 9, -1, -1, -1, 9]


@pytest.mark.parametrize("size", [1, 300, 5000])
@pytest.mark.parametrize(("top_p", "temperature"), [(1e-9, 3.0), (0.9, 0.8), (1.0, 1.0)])
def test_from_a_nucleus(size: int, top_p: float, temperature: float) -> None:
    logits = torch.cat((awkward(size)[::2], peaked(size)))
    rows = len(logits)
    call = (logits, column(rows, temperature), column(rows, top_p), fractions(rows), 16, 100)
    ids, peaks = op["draw_nucleus"](*call)
    wanted, largest = reference("draw_nucleus")(*call)
    same(ids, wanted)
    same(peaks, largest)
    if size > 100 and top_p == 1.0:
        assert (ids == BEYOND).equal(peaks.isfinite())


@pytest.mark.parametrize("size", [1, 300, 5000])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 30.0])
def test_from_a_whole_row(size: int, temperature: float) -> None:
    """Each token lies where a float64 distribution function puts u, up to a margin."""
    logits, u = normal(20, size), fractions(20)
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    logits[:, ::7] = -inf
    logits[:, size // 2] = 1.0
    ids, peaks = op["draw_plain"](logits, column(20, temperature), u)
    same(peaks, logits.amax(-1))
    weights = (logits.double() / temperature).softmax(-1)
    upper = weights.cumsum(-1).gather(1, ids[:, None])[:, 0]
    own = weights.gather(1, ids[:, None])[:, 0]
    assert (own > 0).all()
    assert (u < upper + 1e-6).all()
    assert (u > upper - own - 1e-6).all()


def test_broken_rows_give_no_token() -> None:
    logits = awkward(300)
    rows = len(logits)
    ids, peaks = op["draw_plain"](logits, column(rows, 1.0), fractions(rows))
    same(peaks, reference("argmax")(logits)[1])
    assert (ids == NO_DRAW).equal(~peaks.isfinite())
    off = (column(rows, 1.0), column(rows, 300).long(), column(rows, 1.0), column(rows, -inf))
    unknown = torch.full((rows,), BEYOND, device=DEVICE)
    found = op["draw_beyond"](unknown, logits, *off, fractions(rows))
    assert (found == NO_DRAW).equal(~peaks.isfinite())


CUTS = [
    {},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_k": 200},
    {"top_k": 1, "min_p": 0.1},
    {"min_p": 0.01, "temperature": 3.0},
    {"top_k": 250, "top_p": 0.7, "min_p": 0.001, "temperature": 1.7},
]


def cuts(rows: int, size: int, given: dict[str, float]) -> list[Tensor]:
    """temperature, top_k, top_p and log_min_p, [rows, 1] each."""
    return [
        column(rows, given.get("temperature", 0.7)),
        column(rows, min(given.get("top_k", size), size)).long(),
        column(rows, given.get("top_p", 1.0)),
        column(rows, given.get("min_p", 0.0)).log(),
    ]


@pytest.mark.parametrize("given", CUTS, ids=str)
@pytest.mark.parametrize("size", [1, 300, 5000])
def test_from_what_cuts_leave_of_a_row(given: dict[str, float], size: int) -> None:
    logits = torch.cat((awkward(size), peaked(size)))
    rows = len(logits)
    tokens = torch.full((rows,), BEYOND, device=DEVICE)
    tokens[::5] = 7
    call = (tokens, logits, *cuts(rows, size, given), fractions(rows))
    same(op["draw_beyond"](*call), reference("draw_beyond")(*call))


def test_a_row_is_the_same_alone_and_anywhere() -> None:
    logits = torch.cat((awkward(5000)[[0, 1, 5, 11]], peaked(5000)[2:4]))
    rows, u = len(logits), fractions(len(logits))
    wide = torch.full((rows, 5031), 50.0, device=DEVICE)
    wide[:, 17:5017] = logits
    temperature, top_k, top_p, log_min_p = cuts(rows, 5000, {"top_p": 0.8, "top_k": 900})
    unknown = torch.full((rows,), BEYOND, device=DEVICE)
    calls = {
        "draw_plain": (logits, temperature, u),
        "draw_nucleus": (logits, temperature, top_p, u, 16, 40),
        "draw_beyond": (unknown, logits, temperature, top_k, top_p, log_min_p, u),
    }
    for name, call in calls.items():
        together = op[name](*call)
        for at, strided in itertools.product((0, 3, rows - 1), (False, True)):
            given = [wide[:, 17:5017] if strided and one is logits else one for one in call]
            part = [one[at : at + 1] if isinstance(one, Tensor) else one for one in given]
            alone = op[name](*part)
            for whole, one in zip(
                *((x if isinstance(x, tuple) else (x,)) for x in (together, alone)), strict=True
            ):
                same(one, whole[at : at + 1])


def test_no_rows() -> None:
    empty, one = torch.empty(0, 700, device=DEVICE), torch.empty(0, device=DEVICE)
    none, u = one.long(), one.double()
    assert [x.shape for x in op["draw_plain"](empty, one, u)] == [(0,), (0,)]
    assert [x.shape for x in op["draw_nucleus"](empty, one, one, u, 5, 9)] == [(0,), (0,)]
    assert op["draw_from"](empty[:, :3].long(), empty[:, :3], u).shape == (0,)
    assert op["draw_beyond"](none, empty, one, none, one, one, u).shape == (0,)

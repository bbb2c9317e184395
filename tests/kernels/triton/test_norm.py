from __future__ import annotations

import pytest
import torch

from penstock import ops
from penstock.kernels.triton import launchers
from penstock.kernels.triton.norm import whole_vectors
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 40), (17, 896)])
def test_rms_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, dim + 8, device=DEVICE).to(dtype)[:, :dim]  # strided rows
    weight = torch.rand(dim, device=DEVICE) + 0.5
    found = launchers()["rms_norm"](x, weight, 1e-5)
    expected = ops.op("rms_norm").reference(x, weight, 1e-5)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    alone = torch.cat([launchers()["rms_norm"](row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(found, alone)


@pytest.mark.parametrize("dim", [40, 896])
def test_where_sums_are_exact_so_is_the_rest(dim: int, dtype: torch.dtype) -> None:
    """Of small integers: their squares have the same sum in any order."""
    x = torch.randint(-9, 10, (3, dim)).to(dtype)
    weight = torch.rand(dim) + 0.5
    found = launchers()["rms_norm"](x.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert torch.equal(found.cpu(), ops.op("rms_norm").reference(x, weight, 1e-5))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 40), (17, 896), (2, 25)])
def test_layer_norm(rows: int, dim: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Far from zero, where a variance of one pass would cancel."""
    x = (torch.randn(rows, dim + 8, device=DEVICE) + 30).to(dtype)[:, :dim]
    weight = torch.rand(dim, device=DEVICE) + 0.5
    bias = torch.randn(dim, device=DEVICE) if has_bias else None
    found = launchers()["layer_norm"](x, weight, bias, 1e-5)
    expected = ops.op("layer_norm").reference(x, weight, bias, 1e-5)
    assert found.dtype is dtype
    close = max(CLOSE[dtype], 2e-5)  # the mean's own rounding, of thirty
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    alone = [launchers()["layer_norm"](row, weight, bias, 1e-5) for row in x.split(1)]
    assert torch.equal(found, torch.cat(alone))


def test_rows_that_begin_anywhere() -> None:
    """A row's width decides over vectors: what isn't on 16 bytes, but could be, is copied."""
    whole = torch.randn(5, 80, device=DEVICE)
    for x, vector in ((whole[:, 1:65], 4), (whole[:, 4:68], 4), (whole[:, :63], 1)):
        weight = torch.rand(x.shape[1], device=DEVICE)
        held, found = whole_vectors(x)
        assert found == vector and torch.equal(held, x)
        assert vector == 1 or (held.data_ptr() % 16 == 0 and held.stride(0) % vector == 0)
        fresh = launchers()["rms_norm"](x.clone(), weight, 1e-5)
        assert torch.equal(launchers()["rms_norm"](x, weight, 1e-5), fresh)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    x, weight = torch.randn(3, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    x[1, 7] = value
    for name, more in (("rms_norm", ()), ("layer_norm", (None,))):
        found = launchers()[name](x, weight, *more, 1e-5)
        expected = ops.op(name).reference(x, weight, *more, 1e-5)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_no_rows() -> None:
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert launchers()["rms_norm"](x, weight, 1e-5).shape == (0, 64)
    assert launchers()["layer_norm"](x, weight, None, 1e-5).shape == (0, 64)

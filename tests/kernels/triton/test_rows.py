from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.triton.rows import e4m3_rows, int8_rows, norm_rows
from penstock.ops.linear import quantize_rows, quantize_rows_e4m3
from tests.kernels.triton.conftest import DEVICE

SHAPES = [(1, 128), (3, 40), (5, 896)]
SPREAD = torch.tensor([1e-3, 1.0, 300.0])


def rows(count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Strided rows of different sizes, one of zeros."""
    torch.manual_seed(count * dim)
    x = torch.randn(count, dim + 8) * SPREAD.repeat(count)[:count, None]
    x[count // 2, :] *= count == 1
    return x.to(DEVICE, dtype)[:, :dim]


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        a, b = a.cpu().float(), b.cpu().float()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def on_cpu(*tensors: Tensor | None) -> list[Tensor | None]:
    """For a reference: on a GPU torch divides by a number as it multiplies by its reciprocal."""
    return [None if t is None else t.cpu() for t in tensors]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("count", "dim"), SHAPES)
def test_int8(count: int, dim: int, static: bool, dtype: torch.dtype) -> None:
    x = rows(count, dim, dtype)
    scale = torch.tensor([0.0171], device=DEVICE) if static else None
    found = int8_rows(x, input_scale=scale)
    assert found[0].dtype is torch.int8 and found[1].shape == (count, 1)
    same(found, quantize_rows(x.cpu(), *on_cpu(scale)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("count", "dim", "groups", "padded"),
    [(1, 128, 1, 128), (3, 40, 1, 128), (5, 896, 7, 896), (2, 200, 2, 256), (3, 300, 4, 384)],
)
def test_e4m3(
    count: int, dim: int, groups: int, padded: int, static: bool, dtype: torch.dtype
) -> None:
    x = rows(count, dim, dtype)
    scale = torch.tensor([0.0171], device=DEVICE) if static else None
    codes, scales = e4m3_rows(x, None, 0.0, groups, padded, scale)
    assert codes.dtype is torch.float8_e4m3fn and codes.shape == (count, padded)
    assert not codes[:, dim:].float().any()
    same((codes[:, :dim], scales), quantize_rows_e4m3(x.cpu(), groups, padded, *on_cpu(scale)))


def test_e4m3_rounds_as_the_format_says() -> None:
    """Every value of E4M3, every midpoint of two (ties to even), and either side of it."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (every[1:] + every[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (0.0, 448.0)]
    x = torch.cat((every, middle, *near, torch.tensor([449.0, 470.0, 1e9]))).to(DEVICE)
    x = torch.stack((x, -x))
    one = torch.ones(1, device=DEVICE)
    codes, _ = e4m3_rows(x, None, 0.0, 1, 512, one)
    expected = x.cpu().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes[:, : x.shape[1]].cpu().view(torch.uint8), expected)


@pytest.mark.parametrize("codes", ["int8", "e4m3"])
def test_a_norm_comes_first(codes: str, dtype: torch.dtype) -> None:
    """As if it were an operator of its own; and a row's bits are its own."""
    x = rows(5, 384, dtype)
    norm = torch.rand(384, device=DEVICE) + 0.5

    def fused(x: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        return int8_rows(x, norm, 1e-5) if codes == "int8" else e4m3_rows(x, norm, 1e-5, 3, 384)

    found = fused(x, norm)
    same(found, fused(norm_rows(x, norm, 1e-5), None))
    alone = [fused(row, norm) for row in x.split(1)]
    same(found, (torch.cat([a.float() for a, _ in alone]), torch.cat([b for _, b in alone])))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(value: float, static: bool) -> None:
    x = rows(3, 256, torch.float32).clone()
    x[0, 130] = value
    scale = torch.tensor([0.5], device=DEVICE) if static else None
    same(int8_rows(x, input_scale=scale), quantize_rows(x.cpu(), *on_cpu(scale)))
    codes, scales = e4m3_rows(x, None, 0.0, 2, 256, scale)
    same((codes, scales), quantize_rows_e4m3(x.cpu(), 2, 256, *on_cpu(scale)))
    assert scales.isnan().tolist() == [[False, True], [False, False], [False, False]]


def test_no_rows() -> None:
    x, norm = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert norm_rows(x, None, 1e-5) is x
    assert int8_rows(x, norm, 1e-5)[0].shape == (0, 64)
    assert [t.shape for t in e4m3_rows(x, norm, 1e-5, 1, 128)] == [(0, 128), (0, 1)]

from __future__ import annotations

import pytest
import torch

from penstock import ops
from penstock.kernels.triton import launchers
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


def test_no_rows() -> None:
    x = torch.empty(0, 64, device=DEVICE)
    assert launchers()["rms_norm"](x, torch.ones(64, device=DEVICE), 1e-5).shape == (0, 64)

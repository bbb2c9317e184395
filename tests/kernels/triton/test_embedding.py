from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels.triton import launchers
from penstock.quant import Dense, format_of, parse_scheme
from penstock.quant.format import Packed
from penstock.quant.formats.storage import PANELS, ROWS
from tests.kernels.triton.conftest import DEVICE

NAMES = (
    *("w8a16", "w8a16-g64", "w8a8-asym", "w8a8-tensor", "w4a16-g32", "w4a16-g128-asym"),
    *("w4a16-channel", "fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "nf4-g64", "mxfp4", "nvfp4"),
)


def table(count: int, dim: int) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    torch.manual_seed(3)
    weight = torch.randn(count, dim) * torch.logspace(-3, 2, count)[:, None]
    weight[1] = 0
    return weight


def same(packed: Packed, tokens: Tensor, dim: int, scale: float, levels: int = 0) -> Tensor:
    """The launcher's rows, which are the reference's."""
    held = {name: t.to(DEVICE) for name, t in packed.items()}
    weight = held.pop("weight")
    more = [held.get("scale"), held.get("zero"), levels, held.get("outer")]
    found = launchers()["embedding"](tokens.to(DEVICE), weight, dim, scale, *more)
    expected = ops.op("embedding").reference(tokens.to(DEVICE), weight, dim, scale, *more)
    assert found.dtype is expected.dtype and torch.equal(found, expected)
    assert isinstance(found, Tensor)
    return found.cpu()


@pytest.mark.parametrize("scale", [1.0, 30.199337741083])
@pytest.mark.parametrize("dim", [64, 1100])
def test_plain(dim: int, scale: float, dtype: torch.dtype) -> None:
    packed = Dense(dtype).stored_as(ROWS).pack(table(9, dim))
    tokens = torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    rows = same(packed, tokens, dim, scale)
    assert scale != 1.0 or torch.equal(rows, table(9, dim).to(dtype)[tokens.long()])


@pytest.mark.parametrize("name", NAMES)
def test_quantized(name: str) -> None:
    dim = 1100  # more than a program's columns, and no whole groups
    weight_format = format_of(parse_scheme(name)).stored_as(ROWS)
    packed = weight_format.pack(table(5, dim))
    levels = getattr(weight_format, "levels", 0)
    tokens = torch.tensor([4, 1, 0], dtype=torch.int32)
    rows = same(packed, tokens, dim, 1.0, levels)
    whole = weight_format.unpack(packed, 5, dim)
    assert torch.equal(rows, whole[tokens.long()].bfloat16())
    same(packed, tokens, dim, 0.3, levels)


def test_ids_beside_the_table_read_its_ends() -> None:
    """Not what lies beside it in memory."""
    whole = table(9, 64).to(DEVICE)
    tokens = torch.tensor([-1, 5, 7, 2**31 - 1, -(2**31)], dtype=torch.int32, device=DEVICE)
    found = launchers()["embedding"](tokens, whole[2:7], 64)
    assert torch.equal(found, whole[[2, 6, 6, 6, 2]])


def test_rows_of_anything() -> None:
    """Strided, and numbered by other integers than tokens."""
    states = torch.randn(6, 80, device=DEVICE)[:, 8:72]
    ids = torch.tensor([5, 2], device=DEVICE)
    assert torch.equal(launchers()["embedding"](ids, states, 64), states[ids])
    assert launchers()["embedding"](ids[:0], states, 64).shape == (0, 64)


def test_panels_are_refused() -> None:
    packed = Dense(torch.float32).stored_as(PANELS).pack(table(16, 64))
    with pytest.raises(KernelError, match="this table has the shape"):
        launchers()["embedding"](torch.zeros(1, dtype=torch.int32), packed["weight"], 64)

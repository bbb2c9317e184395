"""Gate, addition, soft cap, kept rows and masks in Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels.triton import launchers
from penstock.ops.panels import round_up
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CANCELS = 1e-5
"""Of gelu: 1 + erf and 1 + tanh lose what is left of them where x is well below zero."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape).to(DEVICE, dtype)


def both(name: str, *arguments: object) -> tuple[Tensor, Tensor]:
    return launchers()[name](*arguments), ops.op(name).reference(*arguments)


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 1100)])
def test_gate(rows: int, columns: int, activation: int, dtype: torch.dtype) -> None:
    x = 4 * randn(rows, columns + 3, dtype=dtype)[:, 3:]  # strided rows
    wide = 4 * randn(rows, 2 * round_up(columns, 16) + 8, dtype=dtype)[:, :-8]
    close = {"rtol": CLOSE[dtype], "atol": max(CLOSE[dtype] / 4, CANCELS)}
    if activation != 4:  # which comes with a gate
        torch.testing.assert_close(*both("gate", x, activation, False, columns), **close)
    found, expected = both("gate", wide, activation, True, columns)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, **close)
    alone = [launchers()["gate"](row, activation, True, columns) for row in wide.split(1)]
    assert torch.equal(found, torch.cat(alone))
    found, expected = both("gate", wide, activation, True, columns, torch.float32)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=CANCELS)


@pytest.mark.parametrize("half", [0, 5, 16, 530])
def test_alternate(half: int) -> None:
    assert torch.equal(*both("alternate", torch.arange(2.0 * half, device=DEVICE)))


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 7), (5, 1030)])
def test_add(rows: int, columns: int, dtype: torch.dtype) -> None:
    wide, x = randn(rows, columns + 5, dtype=dtype), 9 * randn(rows, columns + 2, dtype=dtype)
    copy = wide.clone()
    launchers()["add_"](wide[:, :columns], x[:, 2:])
    ops.op("add_").reference(copy[:, :columns], x[:, 2:])
    assert torch.equal(wide, copy)  # and nothing beside it


@pytest.mark.parametrize(("rows", "columns", "dim"), [(0, 8, 8), (1, 7, 1100), (5, 1030, 33)])
def test_gate_rows(rows: int, columns: int, dim: int, dtype: torch.dtype) -> None:
    wide, x = randn(rows, columns + 5, dtype=dtype), randn(rows, dim + 2, dtype=dtype, seed=1)
    copy, weight = wide.clone(), randn(dim, seed=2)
    launchers()["gate_rows_"](wide[:, :columns], x[:, 2:], weight)
    ops.op("gate_rows_").reference(copy[:, :columns], x[:, 2:], weight)
    torch.testing.assert_close(wide, copy, rtol=max(CLOSE[dtype], 1e-5), atol=1e-5)
    assert torch.equal(wide[:, columns:], copy[:, columns:])


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 7), (5, 1030)])
def test_gate_by(rows: int, columns: int, dtype: torch.dtype) -> None:
    wide, x = randn(rows, columns + 5, dtype=dtype), 4 * randn(rows, columns + 2, dtype=dtype)
    copy = wide.clone()
    launchers()["gate_by_"](wide[:, :columns], x[:, 2:])
    ops.op("gate_by_").reference(copy[:, :columns], x[:, 2:])
    torch.testing.assert_close(wide, copy, rtol=CLOSE[dtype], atol=1e-6)
    assert torch.equal(wide[:, columns:], copy[:, columns:])


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 7), (3, 2500)])
def test_softcap(rows: int, columns: int) -> None:
    """float64's, to some units in the last place, from far below the cap to far above."""
    wide = randn(rows, columns + 4) * torch.logspace(-5, 3, columns + 4, device=DEVICE)
    x = wide[:, 4:]
    expected = torch.tanh(x.double() / 30.0) * 30.0
    before = wide[:, :4].clone()
    launchers()["softcap_"](x, 30.0)
    torch.testing.assert_close(x.double(), expected, rtol=5e-7, atol=0)
    assert torch.equal(wide[:, :4], before)


def test_softcap_of_what_is_not_finite() -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0]], device=DEVICE)
    launchers()["softcap_"](x, 30.0)
    expected = torch.tensor([[30.0, -30.0, torch.nan, 0.0, -0.0]])
    torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_kept_rows(rows: int, dtype: torch.dtype) -> None:
    store = randn(6, 2100, dtype=dtype)
    copy, x = store.clone(), randn(rows, 50, seed=1, dtype=dtype)[:, 1:]
    launchers()["keep_rows"](x, store, 2049)
    ops.op("keep_rows").reference(x, copy, 2049)
    assert torch.equal(store, copy)
    found, expected = both("kept_rows", torch.zeros(rows, dtype=torch.int32), store)
    assert torch.equal(found, expected) and found.dtype is dtype
    assert not rows or found.data_ptr() != store.data_ptr()


@pytest.mark.parametrize("dtype", CLOSE)
def test_place_rows(dtype: torch.dtype) -> None:
    store, wanted = randn(6, 2100, dtype=dtype), torch.tensor([0, 1, 0, 2, 0, 1], device=DEVICE)
    x = randn(4, 2103, seed=1, dtype=dtype)
    copy = x.clone()
    launchers()["place_rows_"](x[:, 3:], store, wanted.int())
    ops.op("place_rows_").reference(copy[:, 3:], store, wanted.int())
    assert torch.equal(x, copy) and torch.equal(x[3, 3:], store[3])
    with pytest.raises(KernelError, match=r"\[4, 2103\] can't come from a store \[6, 2100\]"):
        launchers()["place_rows_"](x, store, wanted.int())


def test_more_rows_than_the_store_has() -> None:
    """As the reference, it raises: nothing is written behind the store."""
    memory = randn(6, 40)
    before = memory.clone()
    with pytest.raises(KernelError, match=r"\[6, 40\] can't be copied to \[4, 40\]"):
        launchers()["keep_rows"](randn(6, 40, seed=1), memory[:4], 0)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("vocab", [31, 32, 2100])
def test_mask(vocab: int) -> None:
    wide = randn(5, vocab + 3)
    wide[2, 7] = torch.nan
    logits, words = wide[:, 3:], -(-vocab // 32)
    copy = wide.clone()
    torch.manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).to(torch.int32)
    bits[0, 0] = -1
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    launchers()["mask_"](logits, rows, bits.to(DEVICE))
    ops.op("mask_").reference(copy[:, 3:], rows, bits.to(DEVICE))
    torch.testing.assert_close(wide, copy, rtol=0, atol=0, equal_nan=True)
    assert logits[4, :31].isfinite().all() and torch.isneginf(logits[0]).any()
    launchers()["mask_"](logits, rows[:0], bits[:0].to(DEVICE))
    torch.testing.assert_close(wide, copy, rtol=0, atol=0, equal_nan=True)

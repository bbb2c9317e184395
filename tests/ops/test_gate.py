"""Activation and gate: `linear` takes them along, or not, with the same bits."""

from __future__ import annotations

import pytest
import torch

from penstock import ops
from penstock.kernels import native
from penstock.ops.panels import COLUMNS, round_up
from penstock.quant import Dense
from tests.ops.test_parity import DTYPES, both, close, randn

needs_native = pytest.mark.skipif(native.handle is None, reason=native.reason)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [1, 2, 3])
@pytest.mark.parametrize("n", [16, 100, 352])
@pytest.mark.usefixtures("isa")
def test_native_and_reference(dtype: torch.dtype, activation: int, n: int) -> None:
    x = 4 * randn(9, n + 3, dtype=dtype)[:, 3:]  # strided rows
    close(*both("gate", lambda: (x, activation, False, n)))
    wide = 4 * randn(9, 2 * round_up(n, COLUMNS), dtype=dtype)
    close(*both("gate", lambda: (wide, activation, True, n)))
    close(*both("gate", lambda: (wide, activation, True, n, torch.float32)))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.usefixtures("isa")
def test_what_linear_takes_along_is_this(dtype: torch.dtype, activation: int, rows: int) -> None:
    n, k = 104, 96
    x, bias = randn(rows, k, dtype=dtype), randn(2 * n, seed=1)
    gated = Dense(dtype).pack(randn(2 * n, k, seed=2), gated=True)["weight"]
    want = ops.linear(x, gated, None, None, bias, n, activation=activation, gated=True)
    product = ops.linear(x, gated, None, None, ops.alternate(bias), 2 * round_up(n, COLUMNS))
    assert torch.equal(ops.gate(product, activation, True, n), want)
    single = Dense(dtype).pack(randn(n, k, seed=3))["weight"]
    want = ops.linear(x, single, None, None, bias[:n], n, activation=activation)
    product = ops.linear(x, single, None, None, bias[:n], n)
    assert torch.equal(ops.gate(product, activation, False, n), want)


def test_a_bias_in_the_order_of_panels() -> None:
    bias = torch.arange(40.0)  # 20 of gate, 20 of up: two panels of each
    got = ops.alternate(bias)
    want = [*range(16), *range(20, 36), *range(16, 20), *[0] * 12, *range(36, 40), *[0] * 12]
    assert got.tolist() == want
    assert ops.op("alternate").reference(bias).tolist() == want


@needs_native
def test_a_bias_that_cant_be_halved() -> None:
    with pytest.raises(RuntimeError, match="bias must be 6 contiguous float32, has 7"):
        ops.alternate(torch.zeros(7))


WRONG = {
    "there is no activation": (64, 0, False, 64, None),
    "activation 7 isn't one of 0": (64, 7, False, 64, None),
    "activation 4 comes with a gate": (64, 4, False, 64, None),
    "64 columns don't give 60": (64, 1, False, 60, None),
    "64 columns don't give 33 with a gate": (64, 1, True, 33, None),
    "out_dtype must be float32 or bfloat16": (64, 1, False, 64, torch.float16),
}


@needs_native
@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments(words: str) -> None:
    columns, *rest = WRONG[words]
    with pytest.raises(RuntimeError, match=words):
        ops.gate(torch.zeros(2, columns), *rest)

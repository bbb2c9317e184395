"""Products by the library against the reference; what it doesn't know is left to the others."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.triton import launchers
from penstock.kernels.triton.fast_linear import LEAST_ROWS, fast_linear, fast_linear_add_
from penstock.quant import Packed
from tests.kernels.triton.conftest import DEVICE, reference
from tests.kernels.triton.test_linear import (
    CLOSE,
    activations,
    arguments,
    options,
    packed,
    randn,
)

NAMES = ["float32", "bfloat16", "w8a8"] + ["fp8-w8a8"] * (DEVICE == "cuda")
wanted = reference("linear")


def case(name: str, n: int, gated: bool = False) -> tuple[torch.Tensor, Packed]:
    w = randn(n * (1 + gated), 128, seed=1) / 128**0.5
    return activations(name, LEAST_ROWS, 128), packed(name, w, gated)


@pytest.mark.parametrize("name", NAMES)
def test_products(name: str) -> None:
    n, (x, held) = 32, case(name, 32)
    how, close = options(name, held), 2 * CLOSE[activations(name, 1, 1).dtype]
    for bias in (None, randn(n, seed=2).to(DEVICE)):
        args = arguments(name, held, bias)
        got, want = fast_linear(x, *args, n, **how), wanted(x, *args, n, **how)
        torch.testing.assert_close(got, want, rtol=close, atol=close)
        residual = activations(name, LEAST_ROWS, n)
        want = residual + want
        fast_linear_add_(residual, x, *args, **how)
        torch.testing.assert_close(residual, want, rtol=close, atol=close)


@pytest.mark.parametrize("name", NAMES)
def test_a_norm_before_and_a_gate_after(name: str) -> None:
    n, (x, held) = 32, case(name, 32, True)
    args, how = arguments(name, held, randn(2 * n, seed=2).to(DEVICE)), options(name, held)
    how |= {"norm": randn(128, seed=3).abs().to(DEVICE), "eps": 1e-5, "activation": 1}
    how |= {"gated": True, "out_dtype": torch.float32}
    got, want = fast_linear(x, *args, n, **how), wanted(x, *args, n, **how)
    tolerance = {"float32": 2e-5, "bfloat16": 5e-2}.get(name, 1e-1)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "w4a16-g128"])
def test_what_is_left_to_the_others(name: str) -> None:
    """Few rows, and matrices that the library can't read: the same bits as always."""
    x, held = case(name, 32)
    rows = x if name.startswith("w4") else x[:5]
    args, how = arguments(name, held, None), options(name, held)
    usual = launchers()["linear"](rows, *args, 32, **how)
    assert torch.equal(fast_linear(rows, *args, 32, **how), usual)
    residual = activations(name, len(rows), 32)
    want = residual + usual
    fast_linear_add_(residual, rows, *args, **how)
    assert torch.equal(residual, want)

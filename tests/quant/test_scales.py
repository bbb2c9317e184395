"""Scales of columns: SmoothQuant's formula, AWQ's search."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.quant import parse_scheme
from penstock.quant.methods import rtn
from penstock.quant.methods.awq import AwqOptions, search_scales
from penstock.quant.methods.smoothquant import smoothing_scales
from penstock.quant.methods.statistics import output_error


def test_smoothing_is_equation_4() -> None:
    weights = [torch.tensor([[1.0, -4.0, 0.0]]), torch.tensor([[-2.0, 1.0, 0.0]])]
    inputs = torch.tensor([8.0, 9.0, 5.0])
    assert smoothing_scales(weights, inputs, 0.5).tolist() == [2.0, 1.5, 1.0]
    assert smoothing_scales(weights, inputs, 1.0).tolist() == [8.0, 9.0, 1.0]
    torch.testing.assert_close(
        smoothing_scales(weights, inputs, 0.0), torch.tensor([1 / 2, 1 / 4, 1.0])
    )
    assert smoothing_scales(weights, torch.tensor([0.0, 1.0, 1.0]))[0] == 1
    with pytest.raises(ConfigError, match="alpha=-1"):
        smoothing_scales(weights, inputs, -1)


def test_columns_with_large_inputs_are_scaled_up() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=random)
    size = torch.ones(128)
    size[[3, 70]] = 30.0
    size[9] = 0.0
    x = torch.randn(500, 128, generator=random) * size
    hessian, scheme = x.t() @ x / 500, parse_scheme("w4a16-g128")
    scales = search_scales([weight[:40], weight[40:]], scheme, x.abs().mean(0), hessian)
    assert scales[[3, 70]].min() > 1.5 * scales[[0, 1, 2, 4]].max()
    assert scales[9] == 1

    def error(s: torch.Tensor) -> float:
        rounded = rtn.quantize(weight * s, scheme).dequantize() / s
        return output_error(weight - rounded, hessian)

    assert error(scales) < 0.8 * error(torch.ones(128))


def test_nothing_is_scaled_where_nothing_is_gained() -> None:
    """A scheme without error: every value of W is a code."""
    weight = torch.randint(-127, 128, (16, 32), generator=torch.manual_seed(1)).float()
    weight[:, 0] = 127
    scales = search_scales([weight], parse_scheme("w8a16"), torch.rand(32), torch.eye(32))
    assert torch.equal(scales, torch.ones(32))
    with pytest.raises(ConfigError, match="grid=0"):
        AwqOptions(grid=0)

"""GPTQ against its definition: what it minimises, when it can't help, and what it refuses."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightsError
from penstock.quant import parse_scheme
from penstock.quant.methods import clip, gptq, rtn
from penstock.quant.methods.gptq import GptqOptions
from penstock.quant.methods.statistics import InputStatistics, output_error

EVERY = ("w8a8", "w4a16-g32", "w4a16-g64-asym", "w8a16-g32-asym", "w4a16-channel", "fp8", "nf4")
EVERY += ("mxfp4", "nvfp4", "fp8-tensor", "fp8-block", "w8a8-tensor")


def correlated(rows: int, k: int, seed: int = 0) -> Tensor:
    """Inputs whose columns depend on each other, as activations' do."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, max(2, k // 8), generator=random)
    mix = torch.randn(hidden.shape[1], k, generator=random)
    return hidden @ mix + 0.1 * torch.randn(rows, k, generator=random)


def hessian_of(x: Tensor) -> Tensor:
    return x.t() @ x / x.shape[0]


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_uncorrelated_inputs_leave_round_to_nearest(name: str, act_order: bool) -> None:
    """For H = I no column can make up for another."""
    weight = torch.randn(24, 160, generator=torch.manual_seed(1))
    scheme = parse_scheme(name)
    options = GptqOptions(act_order=act_order)
    got = gptq.quantize(weight, scheme, torch.eye(160), options)
    want = rtn.quantize(weight, scheme)
    assert torch.equal(got.values.float(), want.values.float())
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.dequantize(), want.dequantize())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_products_err_less_than_rounded_to_nearest(name: str, act_order: bool) -> None:
    weight = torch.randn(32, 128, generator=torch.manual_seed(2))
    hessian = hessian_of(correlated(600, 128))
    scheme = parse_scheme(name)
    options = GptqOptions(act_order=act_order, block=32)
    fitted = gptq.quantize(weight, scheme, hessian, options).dequantize()
    plain = rtn.quantize(weight, scheme).dequantize()
    assert output_error(weight - fitted, hessian) < 0.7 * output_error(weight - plain, hessian)


def test_the_block_changes_nothing_but_the_order_of_additions() -> None:
    weight = torch.randn(16, 96, generator=torch.manual_seed(3))
    hessian, scheme = hessian_of(correlated(500, 96)), parse_scheme("w4a16-g32")
    errors = [
        output_error(
            weight - gptq.quantize(weight, scheme, hessian, GptqOptions(block=block)).dequantize(),
            hessian,
        )
        for block in (1, 32, 128)
    ]
    assert max(errors) < 1.05 * min(errors)


def test_one_column_after_another_by_hand() -> None:
    """Two columns of full correlation but for the damping: the second takes the first's error."""
    hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    options = GptqOptions(damping=1e-6, act_order=False)
    scheme = parse_scheme("w8a16")
    weight = torch.tensor([[0.4, 127.0]])  # scale 1: 0.4 → 0, and 127 + 0.9 · 0.4 → 127
    codes = gptq.quantize(weight, scheme, hessian, options)
    assert codes.values.tolist() == [[0, 127]]
    weight = torch.tensor([[0.4, 100.3, 127.0]])  # 100.3 + 0.36 → 101
    hessian = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    codes = gptq.quantize(weight, scheme, hessian, options)
    assert codes.values.tolist() == [[0, 101, 127]]


def test_a_column_without_inputs_is_rounded_to_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.manual_seed(4))
    x = correlated(300, 64)
    x[:, [5, 40]] = 0
    scheme = parse_scheme("w4a16-g32")
    inverse = gptq.invert(hessian_of(x), GptqOptions())
    assert inverse.dead == 2
    codes = gptq.quantize(weight, scheme, hessian_of(x), inverse=inverse)
    plain = rtn.quantize(weight, scheme)
    assert torch.equal(codes.values[:, [5, 40]], plain.values[:, [5, 40]])
    assert not torch.equal(codes.values, plain.values)


def test_inputs_that_are_all_zero_leave_round_to_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.manual_seed(4))
    scheme = parse_scheme("w4a16-g32")
    codes = gptq.quantize(weight, scheme, torch.zeros(64, 64))
    assert torch.equal(codes.values, rtn.quantize(weight, scheme).values)


def test_damping_grows_until_cholesky_works(caplog: pytest.LogCaptureFixture) -> None:
    hessian = torch.eye(4)
    hessian[0, 1] = hessian[1, 0] = 1.05  # not a matrix of products: an eigenvalue of −0.05
    with caplog.at_level(logging.WARNING):
        inverse = gptq.invert(hessian, GptqOptions(), "layers.0.mlp.up")
    assert inverse.damping == pytest.approx(0.1)
    assert "layers.0.mlp.up: the Hessian can't be inverted with damping 0.01; trying 0.1" in (
        caplog.text
    )
    with pytest.raises(WeightsError, match="can't be inverted, even with"):
        gptq.invert(torch.tensor([[1.0, 99.0], [99.0, 1.0]]), GptqOptions())


def test_what_does_not_fit_is_refused() -> None:
    scheme = parse_scheme("w4a16-g32")
    with pytest.raises(WeightsError, match=r"q is \[4, 64\], but the Hessian .* \[32, 32\]"):
        gptq.quantize(torch.ones(4, 64), scheme, torch.eye(32), name="q")
    with pytest.raises(WeightsError, match="NaN or infinite"):
        gptq.invert(torch.full((2, 2), torch.nan), GptqOptions())
    with pytest.raises(ConfigError, match="damping=0"):
        GptqOptions(damping=0.0)


@pytest.mark.parametrize("name", ["w4a16-g32", "w4a16-g64-asym", "w8a8", "nf4", "w4a16-channel"])
def test_clipped_scales_err_no_more(name: str) -> None:
    """By the sum it minimises: H's diagonal blocks alone."""
    weight = torch.randn(24, 128, generator=torch.manual_seed(5)) ** 3
    scheme = parse_scheme(name)
    width = scheme.group or 128
    hessian = torch.block_diag(
        *(hessian_of(correlated(300, width, seed)) for seed in range(128 // width))
    )
    clipped = clip.quantize(weight, scheme, hessian).dequantize()
    plain = rtn.quantize(weight, scheme).dequantize()
    lost, before = output_error(weight - clipped, hessian), output_error(weight - plain, hessian)
    assert lost < before if name != "w8a8" else lost <= before


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8-tensor"])
def test_scales_that_are_not_free_are_not_searched(name: str) -> None:
    weight, scheme = torch.randn(8, 64), parse_scheme(name)
    assert clip.clipped_scale(weight, torch.eye(64), scheme) is None
    codes = clip.quantize(weight, scheme, torch.eye(64))
    assert torch.equal(codes.dequantize(), rtn.quantize(weight, scheme).dequantize())


def test_statistics_are_those_of_all_rows_together() -> None:
    x = correlated(100, 16)
    seen = InputStatistics(16, histogram=True)
    seen.add(x[:30])
    seen.add(x[30:])
    torch.testing.assert_close(seen.hessian, hessian_of(x))
    torch.testing.assert_close(seen.mean_abs, x.abs().mean(0))
    assert torch.equal(seen.max_abs, x.abs().amax(0))
    assert seen.histogram is not None and int(seen.histogram.counts.sum()) == x.numel()
    weight = torch.randn(8, 16)
    assert output_error(weight, seen.hessian) == pytest.approx(
        float((x @ weight.t()).pow(2).sum(1).mean()), rel=1e-4
    )
    with pytest.raises(WeightsError, match="1 of 16 calibration activations are NaN"):
        seen.add(torch.cat((torch.zeros(15), torch.tensor([torch.nan])))[None])

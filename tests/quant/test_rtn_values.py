"""Codes rounded to nearest, against what specifications, torch and closed forms say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError, WeightsError
from penstock.ops.panels import unpack_codes, unpack_groups
from penstock.quant import format_of, parse_quantization, parse_scheme
from penstock.quant.levels import NF4
from penstock.quant.methods.rtn import choose_scale, encode, nearest_e2m1, quantize

# OCP Microscaling Formats 1.0, table 5: E2M1
_E2M1 = {0b000: 0.0, 0b001: 0.5, 0b010: 1.0, 0b011: 1.5, 0b100: 2.0, 0b101: 3.0, 0b110: 4.0,
         0b111: 6.0}  # fmt: skip


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(n: int, k: int) -> Tensor:
    return randn(n, k) * torch.exp(randn(n, k, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [64, 100, 300])
@pytest.mark.parametrize(
    "name", ["w8a16", "w4a16-g32", "w4a16-g64", "w4a8-g128", "w4a8-g32-asym", "w4a16-g128-asym"]
)
def test_the_operators_give_the_same(name: str, k: int, dtype: torch.dtype) -> None:
    scheme, n = parse_scheme(name), 37
    weight = outliers(n, k).to(dtype)
    codes = quantize(weight, scheme)
    if scheme.kind == "int8":
        panels, scale = ops.quantize_int8(weight)
        zero = None
    else:
        panels, scale, zero = ops.quantize_int4(weight, scheme.group, scheme.symmetric)
    count = codes.scale.shape[1]
    assert torch.equal(unpack_codes(panels)[:n, :k], codes.values)
    assert torch.equal(unpack_groups(scale)[:n, :count].float(), codes.scale)
    assert (codes.zero is None) == scheme.symmetric
    if codes.zero is not None and zero is not None:
        assert torch.equal(unpack_groups(zero)[:n, :count], codes.zero)


@pytest.mark.parametrize("kind", ["fp8", "fp8-e5m2"])
@pytest.mark.parametrize("shared", ["-channel", "-tensor", "-block"])
def test_fp8_is_torch_s(kind: str, shared: str) -> None:
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.float8_e5m2
    end = 448.0 if kind == "fp8" else 57344.0
    weight = outliers(200, 300)
    codes = quantize(weight, parse_scheme(kind + shared))
    top = weight.abs()
    if shared == "-channel":
        scale = top.amax(1, keepdim=True).expand(200, 1) / torch.tensor(end)
    elif shared == "-tensor":
        scale = top.amax().expand(200, 1) / torch.tensor(end)
    else:  # 2 × 3 blocks, the last of each smaller
        scale = torch.empty(200, 3)
        for i in (0, 1):
            for j in range(3):
                block = top[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                scale[128 * i : 128 * i + 128, j] = block.amax() / torch.tensor(end)
    assert torch.equal(codes.scale, scale)
    spread = scale.repeat_interleave(128, 1)[:, :300] if shared == "-block" else scale
    want = (weight / spread).clamp(-end, end).to(dtype)
    assert torch.equal(codes.values.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(codes.dequantize(), want.float() * spread)


def test_four_bits_of_floating_point() -> None:
    """Nearest by exhaustion; a tie goes to the even code; ±6 at most."""
    u = torch.cat([torch.arange(-7, 7.01, 1 / 64), torch.tensor([1e30, -1e30, 0.74999, 0.75001])])
    level = torch.tensor([_E2M1[i] for i in range(8)])
    got = nearest_e2m1(u)
    assert torch.equal(got >> 3, torch.signbit(u).to(torch.uint8))
    for value, code in zip(u.abs().tolist(), (got & 7).tolist(), strict=True):
        off = (level - min(value, 6.0)).abs()
        best = (off == off.min()).nonzero().flatten().tolist()
        assert code in best
        assert len(best) == 1 or code % 2 == 0


def test_mxfp4_has_the_specification_s_scale() -> None:
    """6.3: the largest power of two in the block's top, over that in the largest element, 4."""
    weight = outliers(20, 100) * torch.logspace(-6, 6, 20)[:, None]
    weight[3, :32] = 0
    codes = quantize(weight, parse_scheme("mxfp4"))
    for n in range(20):
        for g in range(4):
            block = weight[n, 32 * g : 32 * g + 32]
            top = float(block.abs().max())
            want = 2.0 ** (math.floor(math.log2(top)) - 2) if top else 1.0
            assert float(codes.scale[n, g]) == want
            own = codes.values[n, 32 * g : 32 * g + 32]
            assert torch.equal(own, nearest_e2m1(block / want))


def test_nvfp4_in_closed_form() -> None:
    weight = outliers(8, 80)
    weight[5] = 0
    codes = quantize(weight, parse_scheme("nvfp4"))
    assert codes.outer is not None
    outer = 1 / (448 * 6 / weight.abs().max())
    assert torch.equal(codes.outer, outer.expand(8))
    groups = weight.unflatten(1, (5, 16))
    scale = (groups.abs().amax(-1) / 6 / outer).to(torch.float8_e4m3fn).float()
    assert torch.equal(codes.scale, scale)
    assert float(codes.scale.max()) == 448.0
    step = (scale * outer)[..., None]
    want = nearest_e2m1(torch.where(step > 0, groups / step, 0.0)).flatten(1)
    assert torch.equal(codes.values, want)
    error = (codes.dequantize().unflatten(1, (5, 16)) - groups).abs()
    # half of the widest step, 2, and what rounding the scale (2⁻⁴ of it) may cut off the top
    assert bool((error <= step * 1.4).all())
    assert not codes.dequantize()[5].any()


def test_nf4_is_the_paper_s() -> None:
    """Absolute maximum of 64, and the nearest of the 16 levels."""
    weight = randn(6, 150)
    codes = quantize(weight, parse_scheme("nf4"))
    level = torch.tensor(NF4)
    for n in range(6):
        for g in range(3):
            block = weight[n, 64 * g : 64 * g + 64]
            top = block.abs().max().half().float()
            assert codes.scale[n, g] == top
            want = (block[:, None] / top - level).abs().argmin(1)
            assert torch.equal(codes.values[n, 64 * g : 64 * g + 64].long(), want)


@pytest.mark.parametrize("name", ["w8a16-asym", "w8a16-g32-asym", "w8a16-tensor-asym"])
def test_zero_points_reach_from_end_to_end(name: str) -> None:
    weight = torch.rand(20, 96, generator=torch.Generator().manual_seed(1)) * 3 - 1
    codes = quantize(weight, parse_scheme(name))
    step = codes.scale.repeat_interleave(codes.scheme.group or 96, 1)
    assert bool(((codes.dequantize() - weight).abs() <= step * 1.02).all())
    assert float(codes.scale.max()) <= 3 / 255 * 1.001
    assert int(codes.values.min()) == -128
    assert int(codes.values.max()) == 127
    positive = quantize(weight + 5, parse_scheme(name))  # zero is always among the values
    assert positive.zero is not None
    assert bool((positive.zero == -128).all())


@pytest.mark.parametrize("name", ["w8a16-tensor", "w4a16-tensor", "w4a16-tensor-asym"])
def test_a_tensor_has_one_scale(name: str) -> None:
    weight = outliers(30, 70)
    codes = quantize(weight, parse_scheme(name))
    assert codes.scale.unique().numel() == 1
    if name == "w8a16-tensor":
        assert codes.scale[0, 0] == weight.abs().max() / torch.tensor(127.0)
    again = encode(weight, codes.scheme, *choose_scale(weight, codes.scheme))
    assert torch.equal(again, codes.values)


def test_int4_takes_the_best_of_four_scales_per_row() -> None:
    weight = outliers(12, 50)
    codes = quantize(weight, parse_scheme("w4a16-channel"))
    lost = (codes.dequantize() - weight).double().square().sum(1)
    end = weight.gather(1, weight.abs().argmax(1, keepdim=True)).double()
    least = torch.full_like(lost, torch.inf)
    for part in (8.0, 8.5, 7.5, 9.0):
        step = (-end / part).half().double()
        rounded = torch.round(weight / step).clamp(-8, 7) * step
        least = torch.minimum(least, (rounded - weight).square().sum(1))
    torch.testing.assert_close(lost, least, rtol=1e-4, atol=1e-9)


def test_rows_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = outliers(50, 70)
    for name in ("w8a16-g32", "fp8-block", "nvfp4", "w4a16-asym"):
        whole = quantize(weight, parse_scheme(name))
        monkeypatch.setattr("penstock.quant.methods.rtn._ROWS_AT_ONCE", 500)
        parts = quantize(weight, parse_scheme(name))
        monkeypatch.undo()
        assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
        assert torch.equal(parts.dequantize(), whole.dequantize())


ALL = [
    "w8a16-g64", "w8a8-asym", "w4a16-channel", "w4a16-tensor-asym", "fp8", "fp8-e5m2", "fp8-block",
    "nf4", "mxfp4", "nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_damage(name: str) -> None:
    fmt = parse_quantization(name)
    zeros = fmt.unpack(fmt.pack(torch.zeros(20, 100)), 20, 100)
    assert torch.equal(zeros, torch.zeros(20, 100))
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = torch.ones(40, 100)
        weight[3, 7] = bad
        with pytest.raises(WeightsError, match=r"1 of 4000 values .* \[40, 100\] are NaN"):
            fmt.pack(weight)
    with pytest.raises(WeightsError, match=r"Only a matrix \[N, K\] .* not \[8\]"):
        fmt.pack(torch.ones(8))


@pytest.mark.parametrize("name", ["nf4", "w8a16-g32", "w4a16-channel"])
def test_scales_beyond_float16(name: str) -> None:
    with pytest.raises(WeightsError, match=r"of 1e\+08 needs a scale beyond float16"):
        parse_quantization(name).pack(torch.full((4, 64), 1e8))


def test_static_activations_need_a_scale() -> None:
    with pytest.raises(ConfigError, match="penstock export MODEL --quant w8a8-static --calib"):
        parse_quantization("w8a8-static")
    scheme = parse_scheme("w8a8-static")
    with pytest.raises(ConfigError, match="--calib TEXT"):
        format_of(scheme).pack(torch.ones(4, 64))
    with pytest.raises(ConfigError, match="no scale of activations that could be given"):
        quantize(torch.ones(4, 64), parse_scheme("w8a8"), 0.1)
    codes = quantize(torch.ones(4, 64), scheme, 0.1)
    assert codes.input_scale == 0.1
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-40):
        with pytest.raises(WeightsError, match="isn't a positive number"):
            format_of(scheme).pack_codes(quantize(torch.ones(4, 64), scheme, bad))

"""Schemes by name, and codes through packed panels and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.errors import ConfigError, WeightsError
from penstock.quant import Codes, Integer, Scheme, format_of, parse_scheme

NAMES = (
    *(
        "w8a16",
        "w8a8",
        "w8a8-static",
        "w8a8-tensor",
        "w8a16-g64",
        "w8a8-asym",
        "w8a8-tensor-static",
    ),
    *("w4a16-g32", "w4a8-g64", "w4a16-g128-asym", "w4a16-channel", "w4a8-tensor-asym"),
    *("fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "fp8-e5m2-tensor"),
    *("nf4-g64", "nf4-g128", "mxfp4", "nvfp4"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_is_called_what_it_is_read_from(name: str) -> None:
    assert parse_scheme(name).name == name


def test_short_names_mean_the_usual_groups() -> None:
    assert parse_scheme("w4a8") == Scheme("int4", 32, activations="int8")
    assert parse_scheme("w8a8-channel") == parse_scheme("w8a8")
    assert parse_scheme("nf4") == Scheme("nf4", 64)
    assert parse_scheme("fp8-e4m3-channel") == parse_scheme("fp8")


@pytest.mark.parametrize(
    "name", ["w5a8", "w4a16-static", "w4a8-g33", "nf4-asym", "fp8-g32", "mxfp4-g64"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_scheme(name)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [32, 96, 200])
@pytest.mark.parametrize(
    "name",
    ["w8a16", "w8a8", "w4a16-g32", "w4a8-g64", "w4a8-g128", "w4a16-g32-asym", "w4a8-g128-asym"],
)
def test_codes_pass_through_panels(name: str, k: int, gated: bool) -> None:
    stored = format_of(parse_scheme(name))
    assert isinstance(stored, Integer)
    n = 40  # of one half where gated
    weight = torch.randn(80 if gated else 40, k, generator=torch.manual_seed(0))
    packed = stored.pack(weight, gated)
    codes = stored.codes(packed, n, k, gated)
    again = stored.codes(stored.pack_codes(codes, gated), n, k, gated)
    assert torch.equal(again.values, codes.values)
    assert torch.equal(again.scale, codes.scale)
    assert torch.equal(again.dequantize(), stored.unpack(packed, n, k, gated))
    # the meaning, written out: (q − zero) · scale of each group
    group = codes.scheme.group or k
    row, column = 7, k - 1
    zero = 8 if codes.zero is None else int(codes.zero[row, column // group])
    value = int(codes.values[row, column]) - (0 if codes.scheme.bits == 8 else zero)
    assert codes.dequantize()[row, column] == value * codes.scale[row, column // group]


def test_scales_that_float16_cannot_hold_stay() -> None:
    codes = Codes(
        parse_scheme("w4a16-g32"),
        torch.full((16, 64), 9, dtype=torch.uint8),
        torch.full((16, 2), 1e-9),
    )
    stored = format_of(codes.scheme)
    packed = stored.pack_codes(codes)
    assert packed["scale"].dtype is torch.float32
    assert torch.equal(stored.unpack(packed, 16, 64), torch.full((16, 64), 1e-9))


def test_four_bits_of_floating_point() -> None:
    sixteen = torch.arange(16, dtype=torch.uint8)[None]
    codes = Codes(parse_scheme("mxfp4"), sixteen, torch.tensor([[4.0]]))
    # OCP Microscaling Formats 1.0, table of E2M1
    half = [0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0]
    assert codes.dequantize().tolist() == [half + [-value for value in half]]


def test_rows_and_stack_undo_each_other() -> None:
    codes = Codes(
        parse_scheme("w4a16-g32-asym"),
        torch.randint(0, 16, (6, 64), dtype=torch.uint8),
        torch.rand(6, 2),
        torch.randint(0, 16, (6, 2), dtype=torch.uint8),
    )
    again = Codes.stack([codes.rows(slice(2)), codes.rows(slice(2, None))])
    assert torch.equal(again.dequantize(), codes.dequantize())
    with pytest.raises(WeightsError, match="can't be stacked"):
        Codes.stack([codes, replace(codes, scheme=parse_scheme("w4a16-g32"), zero=None)])


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"scales \[4, 1\], not \[4, 2\]"):
        Codes(parse_scheme("w4a16-g32"), torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1))

"""Schemes by name, and codes through packed panels and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch

from penstock.errors import ConfigError, WeightsError
from penstock.kernels import native, report_linear
from penstock.quant import SCHEMES, Codes, Dense, Scheme, format_of, parse_scheme
from penstock.quant.levels import E2M1
from penstock.quant.methods.rtn import quantize
from penstock.quant.scheme import Activations, Kind

needs_native = pytest.mark.skipif(native.handle is None, reason="no native kernels")

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
    *("w4a8-g32-blocks", "w8a8-g128-blocks"),
    *("w4a16-g32", "w4a8-g64", "w4a16-g128-asym", "w4a16-channel", "w4a8-tensor-asym"),
    *("fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "fp8-e5m2-tensor"),
    *("fp8-w8a8", "fp8-w8a8-tensor", "fp8-w8a8-block", "fp8-w8a8-static"),
    *("fp8-w8a8-tensor-static", "fp8-w8a8-block-static"),
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
    assert parse_scheme("fp8-w8a8-channel") == Scheme("fp8_e4m3", activations="fp8")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("w5a8", "isn't one of w8a16, w8a8"),
        ("w4a16-static", "activations of 16 bits have no static scale"),
        ("w4a8-g33", "isn't one of"),
        ("w4a16-blocks", "no blocks"),
        ("w8a8-blocks", "have the weights' groups: symmetric"),
        ("w4a8-asym-blocks", "have the weights' groups: symmetric"),
        ("q4_k", "isn't one of"),
        ("nf4-asym", "isn't one of"),
        ("fp8-g32", "fp8 and fp8-w8a8 take -tensor or -block"),
        ("fp8-static", "activations in bfloat16 have no static scale"),
        ("fp8-e5m2-w8a8", "fp8_e5m2 isn't multiplied with activations in fp8"),
        ("mxfp4-g64", "isn't one of"),
    ],
)
def test_other_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_scheme(name)


PACKED = (
    *NAMES,
    *("w8a16-g32", "w8a8-g128-asym", "w4a8-g32-static", "w4a16-g64-asym", "nf4-g32"),
)


def test_every_kind_of_codes_and_activations_is_packed() -> None:
    # rotated ones are packed in tests/ops/test_linear.py: no file holds their codes
    names = (*PACKED, "w8a8-rotated", "w4a8-rotated")
    tried = {(s.kind, s.activations) for s in map(parse_scheme, names)}
    for kind in get_args(Kind):
        for activations in get_args(Activations):
            try:
                Scheme(kind, {"mxfp4": 32, "nvfp4": 16}.get(kind, 0), activations=activations)
            except ConfigError:
                continue
            assert (kind, activations) in tried


@needs_native
@pytest.mark.parametrize("name", PACKED)
def test_doctor_names_what_multiplies_each_scheme(name: str) -> None:
    """`report_linear` has the scheme without what shares its scales."""
    (base,) = [b for b in SCHEMES if re.fullmatch(rf"{b}(-(?!w8a8|e5m2).*)?", name)]
    (row,) = [row for row in report_linear() if base in row[0].split(", ")]
    fmt = format_of(parse_scheme(name))
    integers = fmt.compute in ("int8", "int4")
    assert any("vpdpbusd" in x or "vpmaddubsw" in x for x in row) == integers


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [7, 32, 96, 200])
@pytest.mark.parametrize("name", PACKED)
def test_codes_pass_through_panels(name: str, k: int, gated: bool) -> None:
    """Of rows that fill no panel, and groups that K cuts short."""
    scheme = parse_scheme(name)
    stored, n = format_of(scheme), 37  # n of one half where gated
    weight = torch.randn(2 * n if gated else n, k, generator=torch.manual_seed(0))
    given = 0.125 if name.endswith("static") else None
    codes = quantize(weight, scheme, given)
    packed = stored.pack_codes(codes, gated)
    again = stored.codes(packed, n, k, gated)
    assert torch.equal(again.values.view(torch.uint8), codes.values.view(torch.uint8))
    assert torch.equal(again.scale, codes.scale)
    for other, own in ((again.zero, codes.zero), (again.outer, codes.outer)):
        assert (own is None) == (other is None)
        assert own is None or other is None or torch.equal(own, other)
    assert again.input_scale == given
    held = sum(part.nbytes for key, part in packed.items() if key != "input_scale")
    assert held == stored.nbytes(n, k) * (2 if gated else 1)
    means = stored.unpack(packed, n, k, gated)
    if scheme.kind == "nf4":  # whose levels bfloat16 rounds
        torch.testing.assert_close(means, codes.dequantize(), rtol=2**-8, atol=0)
    else:
        assert torch.equal(means, codes.dequantize())


@pytest.mark.parametrize("name", ["w8a8-asym", "w4a16-g32-asym", "fp8-block", "mxfp4", "nvfp4"])
def test_a_packed_value_written_out(name: str) -> None:
    scheme, n, k = parse_scheme(name), 40, 200
    stored = format_of(scheme)
    weight = torch.randn(n, k, generator=torch.manual_seed(0))
    packed = stored.pack(weight)
    codes = stored.codes(packed, n, k)
    row, column = 37, k - 1
    group = column // (scheme.group or k)
    value = float(codes.values[row, column])
    if scheme.kind in ("mxfp4", "nvfp4"):
        value = E2M1[int(value)]
    if codes.zero is not None:
        value -= int(codes.zero[row, group])
    want = torch.tensor(value) * codes.scale[row, group]
    if codes.outer is not None:
        want = want * codes.outer[row]
    assert stored.unpack(packed, n, k)[row, column] == want


@pytest.mark.parametrize("name", ["w8a16", "w4a8-g64-asym"])
def test_the_operators_codes_pass_too(name: str) -> None:
    stored = format_of(parse_scheme(name))
    packed = stored.pack(torch.randn(40, 200, generator=torch.manual_seed(0)))
    again = stored.pack_codes(stored.codes(packed, 40, 200))
    assert again.keys() == packed.keys()
    assert torch.equal(stored.unpack(again, 40, 200), stored.unpack(packed, 40, 200))


def test_what_a_format_cannot_hold_is_refused() -> None:
    codes = quantize(torch.ones(4, 64), parse_scheme("mxfp4"))
    with pytest.raises(WeightsError, match="8 of 8 scales in mxfp4 aren't a power of two"):
        format_of(codes.scheme).pack_codes(replace(codes, scale=codes.scale * 1.5))
    codes = quantize(torch.ones(4, 64), parse_scheme("nvfp4"))
    with pytest.raises(WeightsError, match="16 of 16 scales in nvfp4 aren't a value of E4M3"):
        format_of(codes.scheme).pack_codes(replace(codes, scale=codes.scale * 1.01))
    with pytest.raises(WeightsError, match="Codes in nvfp4 can't be stored as mxfp4"):
        format_of(parse_scheme("mxfp4")).pack_codes(codes)
    codes = quantize(torch.ones(4, 64), parse_scheme("fp8"))
    values = codes.values.view(torch.uint8).clone()
    values[2, 3] = 0x7F  # E4M3's NaN
    damaged = replace(codes, values=values.view(torch.float8_e4m3fn))
    with pytest.raises(WeightsError, match=r"1 scales or values of a matrix \[4, 64\] in fp8 are"):
        format_of(codes.scheme).pack_codes(damaged)
    with pytest.raises(WeightsError, match="bfloat16 isn't quantized"):
        Dense(torch.bfloat16).codes({}, 4, 64)


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

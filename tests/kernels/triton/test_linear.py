"""`linear` in Triton, in every format, against the references; and its bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels.triton import launchers, linear_tiles
from penstock.quant import Codes, Dense, Packed, WeightFormat, format_of, parse_scheme
from penstock.quant.formats.operators import OperatorFormat
from penstock.quant.formats.quantized import Quantized
from penstock.quant.formats.storage import ROWS
from penstock.quant.methods.rtn import quantize
from tests.kernels.triton.conftest import DEVICE, reference

linear, linear_add_ = launchers()["linear"], launchers()["linear_add_"]
wanted = reference("linear")

QUANTIZED = [
    "w8a16", "w8a16-g64", "w8a16-g128-asym", "w8a8", "w8a8-asym", "w8a8-g32-asym", "w8a8-static",
    "w4a16", "w4a16-g64-asym", "w4a16-g128", "w4a16-channel", "w4a8", "w4a8-g64", "w4a8-g128-asym",
    "w4a8-channel-asym", "fp8", "fp8-block", "fp8-e5m2", "fp8-w8a8", "fp8-w8a8-block",
    "fp8-w8a8-tensor-static", "nf4", "mxfp4", "nvfp4", "w8a8-rotated", "w4a8-rotated",
    "w8a8-asym-rotated",
]  # fmt: skip
INPUT_TOP = 3.5
"""What static scales reach to: some of a normal distribution's activations lie beyond."""
FORMATS: dict[str, WeightFormat] = {
    "float32": Dense(torch.float32).stored_as(ROWS),
    "float16": Dense(torch.float16).stored_as(ROWS),
    "bfloat16": Dense(torch.bfloat16).stored_as(ROWS),
    **{name: format_of(parse_scheme(name)).stored_as(ROWS) for name in QUANTIZED},
}
EACH_WAY = [
    "float32", "float16", "bfloat16", "w8a16-g128-asym", "w8a8-static", "w8a8-asym", "w4a16-g128",
    "w4a8-channel-asym", "fp8-block", "fp8-w8a8-block", "nf4", "nvfp4", "w8a8-rotated",
]  # fmt: skip
"""Formats that take each way through the kernels' steps and ends."""
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(name: str, rows: int, k: int) -> Tensor:
    dtype = getattr(torch, name) if name.startswith(("float", "bfloat")) else torch.bfloat16
    return randn(rows, k).to(DEVICE, dtype)


def packed(name: str, weight: Tensor, gated: bool = False) -> Packed:
    """Rounded to nearest; a static scale of activations is given."""
    fmt = FORMATS[name]
    if isinstance(fmt, Quantized) and fmt.scheme.static:
        scale = INPUT_TOP / (127 if name.startswith("w") else 448)
        parts = weight.chunk(2) if gated else (weight,)
        codes = Codes.stack([quantize(part, fmt.scheme, scale) for part in parts])
        held = fmt.pack_codes(codes, gated)
    else:
        held = fmt.pack(weight, gated)
    return {name: tensor.to(DEVICE) for name, tensor in held.items()}


def arguments(name: str, held: Packed, bias: Tensor | None) -> tuple[object, ...]:
    """weight, scale, zero, bias."""
    return held["weight"], held.get("scale"), held.get("zero"), bias


def options(name: str, held: Packed) -> dict[str, object]:
    fmt = FORMATS[name]
    assert isinstance(fmt, OperatorFormat)
    return {
        "row_codes": fmt.row_codes,
        "levels": fmt.levels,
        "outer": held.get("outer"),
        "input_scale": held.get("input_scale"),
    }


@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str) -> None:
    even = [(17, 128, 8)] if name in ("bfloat16", "w8a8", "w4a16") else []
    for rows, k, n in [(3, 300, 70), *even]:
        x, held = activations(name, rows, k), packed(name, randn(n, k, seed=1) / k**0.5)
        bias, how = randn(n, seed=2).to(DEVICE), options(name, held)
        args = arguments(name, held, bias)
        got = linear(x, *args, n, **how, out_dtype=torch.float32)
        want = wanted(x, *args, n, **how, out_dtype=torch.float32)
        # a GPU sums products of E4M3 in fewer bits, 128 at a time
        near = 2e-3 if name.startswith("fp8-w8a8") and DEVICE == "cuda" else 2e-5
        torch.testing.assert_close(got, want, rtol=near, atol=near)
        got = linear(x, *args, n, **how)
        assert got.dtype is x.dtype
        torch.testing.assert_close(
            got, wanted(x, *args, n, **how), rtol=CLOSE[x.dtype], atol=CLOSE[x.dtype]
        )
        residual = activations(name, rows, 2 * n)[:, n:]  # rows may be strided
        want = residual + got
        linear_add_(residual, x, *args, **how)
        assert torch.equal(residual, want)


@pytest.mark.parametrize("name", EACH_WAY)
def test_a_norm_before_and_a_gate_after(name: str) -> None:
    (k, n), norm = (172, 40), randn(172, seed=3).abs().to(DEVICE)
    x, held = activations(name, 5, k), packed(name, randn(2 * n, k, seed=1) / k**0.5, True)
    args, how = arguments(name, held, randn(2 * n, seed=2).to(DEVICE)), options(name, held)
    how |= {"norm": norm, "eps": 1e-5, "activation": 1, "gated": True}
    got, want = linear(x, *args, n, **how), wanted(x, *args, n, **how)
    # where a norm rounds up and not down, a code of a row may be the next one
    tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}.get(name, 8e-2)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    how["norm"] = None
    assert torch.equal(got, linear(launchers()["rms_norm"](x, norm, 1e-5), *args, n, **how))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_by_themselves_and_together(name: str) -> None:
    k, n = 172, 20
    x, held = activations(name, 35, k), packed(name, randn(n, k, seed=1))
    args, how = arguments(name, held, None), options(name, held)
    together = linear(x, *args, n, **how, out_dtype=torch.float32)
    for first, last in [(0, 1), (1, 18)]:
        part = linear(x[first:last], *args, n, **how, out_dtype=torch.float32)
        assert torch.equal(part, together[first:last])
    want = wanted(x, *args, n, **how, out_dtype=torch.float32)
    torch.testing.assert_close(together, want, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "w8a8", "w4a16-g128", "fp8-w8a8-block"])
@pytest.mark.parametrize("gated", [False, True])
def test_spans(name: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span in a program of its own, or all in one: the same bits."""
    k, n = 300, 24
    monkeypatch.setattr(linear_tiles, "LEAST_SPAN", 128)
    x, w = activations(name, 3, k), randn(n * (1 + gated), k, seed=1) / k**0.5
    held = packed(name, w, gated)
    args, how = arguments(name, held, randn(len(w), seed=2).to(DEVICE)), options(name, held)
    how |= {"activation": 3 * gated, "gated": gated, "out_dtype": torch.float32}
    assert linear_tiles.spans_for(n, k) == 2
    apart = linear(x, *args, n, **how)
    torch.testing.assert_close(apart, wanted(x, *args, n, **how), rtol=1e-2, atol=1e-2)
    assert torch.equal(apart[1:2], linear(x[1:2], *args, n, **how))
    for limit in ("PROCESSORS", "ONE_SUM", "HALVES_APART"):
        monkeypatch.setattr(f"penstock.kernels.triton.linear.{limit}", 0)
    assert torch.equal(linear(x, *args, n, **how), apart)


@pytest.mark.parametrize("kind", ["bfloat16", "w4a16-g128", "w8a8"])
def test_tiles_change_no_bit(kind: str) -> None:
    k, n, rows = 300, 70, 33
    x, held = activations(kind, rows, k), packed(kind, randn(n, k, seed=1))
    args, how = arguments(kind, held, None), options(kind, held)
    usual = linear(x, *args, n, **how)
    name: linear_tiles.Kind = {"bfloat16": "half", "w4a16-g128": "w4a16", "w8a8": "w8a8"}[kind]
    for tile in [(64, 16, 4, 2), (128, 32, 8, 3), (64, 128, 4, 2)]:
        linear_tiles.override({(name, False, 64): tile})
        try:
            assert torch.equal(linear(x, *args, n, **how), usual)
        finally:
            linear_tiles.override({})
    with pytest.raises(KeyError, match="There are no tiles"):
        linear_tiles.override({(name, False, 65): (64, 16, 4, 2)})


@pytest.mark.parametrize("n", [64, 896, 4096, 6144, 14336, 128256])
@pytest.mark.parametrize("k", [64, 896, 2048, 4096, 4864, 14336])
def test_spans_make_k(n: int, k: int) -> None:
    kinds: list[tuple[linear_tiles.Kind, int, int]] = [("half", 64, 1024), ("w4a16", 128, 512)]
    for kind, step, least in kinds:
        spans = linear_tiles.spans_for(n, k, kind)
        length = linear_tiles.span_length(k, spans)
        assert (spans - 1) * length < k <= spans * length
        assert length % 128 == 0 and (spans == 1 or length >= least)
        for rows in (1, 16, 17, 5000):
            tiles = linear_tiles.tiles_for(kind, rows, n, k)
            assert (tiles.spans, tiles.k) == (spans, step)
            assert length % tiles.step(k, length) in (0, length % step)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("name", EACH_WAY)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    k, n = 172, 20
    x, held = activations(name, 3, k), packed(name, randn(n, k, seed=1))
    args, how = arguments(name, held, None), options(name, held)
    clean = linear(x, *args, n, **how)
    x[1, 70], x[2, 90] = torch.nan, torch.inf
    got = linear(x, *args, n, **how)
    assert not got[1:].isfinite().any()
    assert torch.equal(got[:1], clean[:1])


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_hold_what_panels_hold(name: str) -> None:
    k, n = 300, 40
    panels = format_of(parse_scheme(name))
    assert isinstance(panels, Quantized)
    codes = quantize(randn(n, k), panels.scheme, 1.0 if panels.scheme.static else None)
    rows = panels.stored_as(ROWS)
    assert torch.equal(
        rows.unpack(rows.pack_codes(codes), n, k), panels.unpack(panels.pack_codes(codes), n, k)
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("activation", [1, 2, 3])
def test_activations_from_end_to_end_of_the_range(activation: int) -> None:
    """Through a weight of 1: the activation itself."""
    points = [-1e30, -200.0, -88.0, -5.0, -0.5, -1e-30, 0.0, 0.3, 4.0, 88.0, 200.0, 1e30, torch.nan]
    x, one = torch.tensor(points, device=DEVICE)[:, None], torch.ones(1, 1, device=DEVICE)
    got = linear(x, one, None, None, None, 1, activation=activation)
    want = wanted(x.double(), one.double(), None, None, None, 1, activation=activation)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=3e-7, equal_nan=True)


def test_no_rows() -> None:
    held = packed("w4a16", randn(8, 64))
    x = activations("w4a16", 0, 64)
    assert linear(x, *arguments("w4a16", held, None), 8).shape == (0, 8)


def test_integers_are_summed_exactly() -> None:
    """Codes of 127 by codes of 127 and 126: float32 would round their sums."""
    k = 2048
    weight = torch.full((2, k), 127, dtype=torch.int8, device=DEVICE)
    x = torch.full((1, k), 127.0, device=DEVICE).bfloat16()
    x[0, 0] = 126.0
    scale = torch.ones(2, 1, device=DEVICE)
    got = linear(x, weight, scale, None, None, 2, 1, out_dtype=torch.float32)
    assert torch.equal(got.cpu(), torch.full((1, 2), 127.0 * (127 * (k - 1) + 126)))


def test_bad_arguments_are_refused() -> None:
    x, w = randn(2, 128).to(DEVICE).bfloat16(), randn(32, 128)
    held = packed("w4a8", w)
    q, scale = held["weight"], held["scale"]

    def refused(match: str, *args: object, **how: object) -> None:
        with pytest.raises(KernelError, match=match):
            linear(*args, **how)

    refused("isn't in rows", x, ops.pack(w.bfloat16(), torch.bfloat16), None, None, None, 32)
    refused("has 32 features, not 48", x, q, scale, None, None, 48, 1)
    refused("has 16 features, not 32", x, q, scale, None, None, 32, 1, gated=True)
    refused("without a scale", x, w.to(DEVICE), None, None, None, 32)
    refused("don't belong to rows", x, q, scale[:1], None, None, 32, 1)
    refused("don't belong to rows", x.repeat(1, 2), q, scale, None, None, 32, 1)
    refused("doesn't meet rows in e4m3", x, q, scale, None, None, 32, 2)
    refused("bfloat16, not to torch.float16", x.half(), q, scale, None, None, 32)
    refused("bfloat16, not to torch.float32", x.float(), q, scale, None, None, 32)
    refused("2 values of K share a scale", x, q, scale.repeat(1, 16), None, None, 32)

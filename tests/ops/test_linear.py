"""`linear` in every format: native against the reference, and fused against its parts, by ==."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.ops.linear import quantize_rows
from penstock.quant import Codes, Dense, Integer, Packed, WeightFormat, format_of, parse_scheme
from penstock.quant.methods.rtn import quantize

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

QUANTIZED = [
    "w8a16", "w8a8", "w4a16", "w4a8", "w4a8-g64", "w4a16-g128", "w4a8-g128-asym", "w4a16-g32-asym",
    "w8a8-asym", "w8a16-g128-asym", "w8a8-g32-asym", "w8a8-static", "w4a8-channel-asym",
    "fp8-block", "fp8-e5m2", "nf4", "mxfp4", "nvfp4",
]  # fmt: skip
INPUT_SCALE = 3.5 / 127
"""Of static activations: some of a normal distribution's lie beyond."""
FORMATS: dict[str, WeightFormat] = {
    "float32": Dense(torch.float32),
    "bfloat16": Dense(torch.bfloat16),
    **{name: format_of(parse_scheme(name)) for name in QUANTIZED},
}
SHAPES = [(32, 16), (172, 64), (100, 7), (300, 50), (1000, 100)]  # K, N


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(name: str, rows: int, k: int) -> Tensor:
    return randn(rows, k).to(torch.float32 if name == "float32" else torch.bfloat16)


def pack(fmt: WeightFormat, weight: Tensor, gated: bool = False) -> Packed:
    """Rounded to nearest; a static scale of activations is given."""
    if not (isinstance(fmt, Integer) and fmt.scheme.activations == "int8_static"):
        return fmt.pack(weight, gated)
    parts = weight.chunk(2) if gated else (weight,)
    codes = Codes.stack([quantize(part, fmt.scheme, INPUT_SCALE) for part in parts])
    return fmt.pack_codes(codes, gated)


def exact(x: Tensor, name: str, weight: Tensor) -> Tensor:
    """x · Wᵀ in float64, of what the format stores and what its rows are rounded to."""
    fmt = FORMATS[name]
    n, k = weight.shape
    packed = pack(fmt, weight)
    stored = fmt.unpack(packed, n, k).double()
    if isinstance(fmt, Integer) and fmt.int8_rows:
        q, scale = quantize_rows(x, packed.get("input_scale"))
        return (q.double() @ stored.t()) * scale.double()
    return x.double() @ stored.t()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 17, 64, 130])
@pytest.mark.usefixtures("isa")
def test_products(name: str, rows: int) -> None:
    fmt = FORMATS[name]
    for k, n in SHAPES:
        x, w, bias = activations(name, rows, k), randn(n, k, seed=1) / k**0.5, randn(n, seed=2)
        packed = pack(fmt, w)
        want = exact(x, name, w)
        got = fmt.matmul(x, packed, None, n, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        got = fmt.matmul(x, packed, bias, n)
        assert got.dtype == x.dtype
        tolerance = 2e-5 if name == "float32" else 8e-3
        torch.testing.assert_close(got.double(), want + bias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_reference(name: str) -> None:
    """The Python reference of a gated product with a norm agrees with the native one."""
    fmt, (k, n) = FORMATS[name], (300, 50)
    x, w = activations(name, 5, k), randn(2 * n, k, seed=1) / k**0.5
    packed, norm = pack(fmt, w, gated=True), randn(k, seed=3).abs()
    args = (
        x, packed["weight"], packed.get("scale"), packed.get("zero"), randn(2 * n, seed=2), n,
        isinstance(fmt, Integer) and fmt.int8_rows, norm, 1e-5, 1, True, torch.float32,
        getattr(fmt, "levels", 0), packed.get("outer"), packed.get("input_scale"),
    )  # fmt: skip
    got, want = ops.op("linear").call(*args), ops.op("linear").reference(*args)
    # one rounded input that differs in its last bit moves an int8 row by a step
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}.get(name, 6e-2)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("isa")
def test_rows_by_themselves_and_together(name: str) -> None:
    fmt = FORMATS[name]
    for k, n in [(172, 64), (1000, 100)]:
        x, packed = activations(name, 70, k), pack(fmt, randn(n, k, seed=1))
        together = fmt.matmul(x, packed, None, n)
        for first, last in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 33), (33, 70)]:
            assert torch.equal(fmt.matmul(x[first:last], packed, None, n), together[first:last])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.usefixtures("isa")
def test_a_norm_before(name: str, rows: int) -> None:
    fmt, (k, n) = FORMATS[name], (300, 50)
    x, norm, packed = activations(name, rows, k), randn(k, seed=3), pack(fmt, randn(n, k, seed=1))
    fused = fmt.matmul(x, packed, None, n, norm=norm, eps=1e-5)
    assert torch.equal(fused, fmt.matmul(ops.rms_norm(x, norm, 1e-5), packed, None, n))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("n", [48, 50])
@pytest.mark.usefixtures("isa")
def test_a_gate_after(name: str, rows: int, n: int) -> None:
    """act(gate) · up, from products that were stored in between."""
    fmt, k = FORMATS[name], 172
    x, w, bias = activations(name, rows, k), randn(2 * n, k, seed=1) / 9, randn(2 * n, seed=2)
    fused = fmt.matmul(x, pack(fmt, w, True), bias, n, activation="silu", gated=True)
    gate, up = (
        fmt.matmul(x, pack(fmt, w[i * n : i * n + n]), bias[i * n : i * n + n], n).float()
        for i in (0, 1)
    )
    tolerance = 1e-6 if name == "float32" else 8e-3
    want = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    torch.testing.assert_close(fused, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(
        fmt.unpack(pack(fmt, w, True), n, k, True)[:n], fmt.unpack(pack(fmt, w[:n]), n, k)
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.usefixtures("isa")
def test_activations_from_end_to_end_of_the_range(activation: ops.Activation) -> None:
    """Through a weight of 1: the activation itself."""
    points = [-1e30, -200.0, -88.0, -5.0, -0.5, -1e-30, 0.0, 0.3, 4.0, 88.0, 200.0, 1e30]
    x = torch.tensor(points, dtype=torch.float32)[:, None]
    packed = Dense(torch.float32).pack(torch.ones(1, 1))
    got = Dense(torch.float32).matmul(x, packed, None, 1, activation=activation)
    tanh = {"gelu": "none", "gelu_tanh": "tanh"}
    if activation == "silu":
        want = torch.nn.functional.silu(x.double())
    else:
        want = torch.nn.functional.gelu(x.double(), approximate=tanh[activation])
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=3e-7)
    nan = Dense(torch.float32).matmul(x * torch.nan, packed, None, 1, activation=activation)
    assert nan.isnan().all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.usefixtures("isa")
def test_a_residual_after(name: str, rows: int) -> None:
    fmt, (k, n) = FORMATS[name], (172, 50)
    x, bias, packed = activations(name, rows, k), randn(n, seed=2), pack(fmt, randn(n, k, seed=1))
    wide = activations(name, rows, 2 * n)  # rows may be strided
    residual = wide[:, n:].clone()
    fmt.add_(wide[:, n:], x, packed, bias)
    assert torch.equal(wide[:, n:], residual + fmt.matmul(x, packed, bias, n))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("isa")
def test_strided_rows(name: str) -> None:
    fmt, wide = FORMATS[name], activations(name, 9, 200)
    x, packed = wide[:, 40:136], pack(fmt, randn(48, 96, seed=1))
    assert torch.equal(
        fmt.matmul(x, packed, None, 48), fmt.matmul(x.contiguous(), packed, None, 48)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.usefixtures("isa")
def test_a_nan_stays_in_its_row(name: str, rows: int) -> None:
    fmt, (k, n) = FORMATS[name], (172, 50)
    x, packed = activations(name, rows, k), pack(fmt, randn(n, k, seed=1))
    clean = fmt.matmul(x, packed, None, n)
    x[1, 70] = torch.nan
    got = fmt.matmul(x, packed, None, n)
    assert got[1].isnan().all()
    assert torch.equal(got[0], clean[0])
    x[1, 70] = torch.inf
    assert not fmt.matmul(x, packed, None, n)[1].isfinite().any()


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a8-g128-asym", "w8a8-asym", "w8a8-g32-asym"])
@pytest.mark.usefixtures("isa")
def test_integers_at_their_ends(name: str) -> None:
    """All-largest weights and rows: nothing saturates on the way."""
    fmt, k = FORMATS[name], 4864
    for sign in (1.0, -1.0):
        w = torch.full((16, k), sign)
        w[:, ::2] *= -1 if name.endswith("asym") else 1
        x = torch.ones(6, k, dtype=torch.bfloat16)
        got = fmt.matmul(x, pack(fmt, w), None, 16, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), exact(x, name, w), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.usefixtures("isa")
def test_rows_of_a_quantized_table(name: str) -> None:
    fmt, table = FORMATS[name], randn(100, 172)
    packed, tokens = pack(fmt, table), torch.tensor([0, 99, 5, 5, 17], dtype=torch.int32)
    whole = fmt.unpack(packed, 100, 172)[tokens.long()].to(torch.bfloat16)
    assert torch.equal(fmt.gather(tokens, packed, 172, 1.0), whole)
    scaled = (whole.float() * 7.5).to(torch.bfloat16)
    assert torch.equal(fmt.gather(tokens, packed, 172, 7.5), scaled)


def test_bad_arguments_are_refused() -> None:
    x, w = randn(2, 64), randn(32, 64)
    packed = FORMATS["w4a8"].pack(w)
    q, scale = packed["weight"], packed["scale"]

    def refused(match: str, *args: object) -> None:
        with pytest.raises(RuntimeError, match=match):
            ops.op("linear").call(*args)

    refused("packed panels", x, w, None, None, None, 32)
    refused(
        "isn't the packed form of",
        x[:, :0],
        Dense(torch.float32).pack(w)["weight"],
        None,
        None,
        None,
        32,
    )
    refused("with a scale", x.bfloat16(), q, None, None, None, 32)
    refused("bfloat16 rows", x, q, scale, None, None, 32, True)
    refused("float16 or float32", x.bfloat16(), q, scale[:1], None, None, 32, True)
    refused(r"isn't the packed form of \[48, 64\]", x.bfloat16(), q, scale, None, None, 48, True)
    refused(
        "uint8 for int4 or int8 for int8",
        x.bfloat16(),
        FORMATS["w8a8"].pack(w)["weight"],
        scale,
        scale,
        None,
        32,
    )
    refused(
        "need a quantized weight",
        x,
        Dense(torch.float32).pack(w)["weight"],
        None,
        None,
        None,
        32,
        True,
    )
    refused("activation 9", x.bfloat16(), q, scale, None, None, 32, True, None, 0.0, 9)
    with pytest.raises(RuntimeError, match="residual has 3 rows, x has 2"):
        ops.linear_add_(torch.zeros(3, 32).bfloat16(), x.bfloat16(), q, scale, None, None)


@pytest.mark.parametrize("int8_rows", [False, True])
@pytest.mark.parametrize(("bits", "groups"), [(8, 2), (8, 4), (4, 2)])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("isa")
def test_groups_longer_than_a_block(int8_rows: bool, bits: int, groups: int, rows: int) -> None:
    """Of any length that the operator takes, not only those that a format has."""
    k, n = 8192, 48
    draw = torch.Generator().manual_seed(groups)
    if bits == 8:
        weight = torch.randint(-127, 128, (n // 16, k // 4, 16, 4), generator=draw).to(torch.int8)
    else:
        weight = torch.randint(0, 256, (n // 16, k // 8, 16, 4), generator=draw).to(torch.uint8)
    scale = torch.rand(n // 16, groups, 16, generator=draw) / k
    x = activations("w8a16", rows, k)
    args = (x, weight, scale, None, None, n, int8_rows)
    got, want = ops.op("linear").call(*args), ops.op("linear").reference(*args)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_a_panel_cut_short_is_refused() -> None:
    x, weight = activations("bfloat16", 5, 48), torch.zeros(1, 24, 16, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="a panel of 48 values of K, which must be a multiple"):
        ops.linear(x, weight, None, None, None, 16)

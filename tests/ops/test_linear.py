"""`linear` in every format: native against the reference, and fused against its parts, by ==."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import WeightsError
from penstock.kernels import native
from penstock.ops.levels import E2M1, NF4
from penstock.ops.linear import ROW_CODES, quantize_blocks, quantize_rows, quantize_rows_e4m3
from penstock.ops.rotate import rotated
from penstock.quant import Codes, Dense, Integer, Packed, WeightFormat, format_of, parse_scheme
from penstock.quant.formats.operators import OperatorFormat
from penstock.quant.formats.quantized import Quantized
from penstock.quant.methods.rtn import quantize

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

QUANTIZED = [
    "w8a16", "w8a8", "w4a16", "w4a8", "w4a8-g64", "w4a16-g128", "w4a8-g128-asym", "w4a16-g32-asym",
    "w8a8-asym", "w8a16-g128-asym", "w8a8-g32-asym", "w8a8-static", "w4a8-channel-asym",
    "w8a8-rotated", "w4a8-rotated", "w8a8-asym-rotated",
    "w4a8-blocks", "w8a8-g32-blocks", "w8a8-g128-blocks", "w4a8-g64-blocks",
    "fp8-block", "fp8-e5m2", "fp8-w8a8", "fp8-w8a8-block", "fp8-w8a8-tensor-static",
    "nf4", "mxfp4", "nvfp4",
]  # fmt: skip
INPUT_TOP = 3.5
"""What static scales reach to: some of a normal distribution's activations lie beyond."""
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
    if not (isinstance(fmt, Quantized) and fmt.scheme.static):
        return fmt.pack(weight, gated)
    scale = INPUT_TOP / (127 if isinstance(fmt, Integer) else 448)
    parts = weight.chunk(2) if gated else (weight,)
    codes = Codes.stack([quantize(part, fmt.scheme, scale) for part in parts])
    return fmt.pack_codes(codes, gated)


def row_codes(fmt: WeightFormat) -> int:
    assert isinstance(fmt, OperatorFormat)
    return fmt.row_codes


def exact(x: Tensor, name: str, weight: Tensor) -> Tensor:
    """x · Wᵀ in float64, of what the format stores and what its rows are rounded to."""
    fmt = FORMATS[name]
    n, k = weight.shape
    packed = pack(fmt, weight)
    stored = fmt.unpack(packed, n, k).double()
    match ROW_CODES[row_codes(fmt)]:
        case "int8":
            q, scale = quantize_rows(x, packed.get("input_scale"))
            return (q.double() @ stored.t()) * scale.double()
        case "int8_blocks":
            assert isinstance(fmt, Quantized)
            return quantize_blocks(x, fmt.scheme.group).double() @ stored.t()
        case "int8_rotated":
            q, scale = quantize_rows(rotated(x))
            whole = fmt.unpack(packed, n, q.shape[1]).double()  # what lies in the padding, too
            return (rotated(q).double() @ whole.t()) * scale.double()
        case "e4m3":
            padded, groups = packed["weight"].shape[1] * 4, packed["scale"].shape[1]
            q, scale = quantize_rows_e4m3(x, groups, padded, packed.get("input_scale"))
            of_each = scale.repeat_interleave(padded // groups, 1)[:, :k]
            return (q.double() * of_each.double()) @ stored.t()
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
        row_codes(fmt), norm, 1e-5, 1, True, torch.float32,
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
        for rows in range(4, 26):  # however they are dealt to passes
            assert torch.equal(fmt.matmul(x[:rows], packed, None, n), together[:rows])


@pytest.mark.parametrize("name", ["w8a16", "w8a16-asym", "w4a16", "w4a16-asym", "fp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 17])
def test_codes_times_tiny_and_huge_rows(name: str, rows: int) -> None:
    """Products and sums below and near float32's smallest, and near its largest."""
    fmt, (k, n) = format_of(parse_scheme(name)), (320, 50)
    x, packed = randn(rows, k).bfloat16(), pack(fmt, randn(n, k, seed=1))
    before, found = native.isa, []
    for isa in native.available_isas():
        native.select_isa(isa)
        found.append([
            fmt.matmul(x * 2.0**power, packed, None, n, out_dtype=torch.float32)
            for power in (-133, -126, -118, -80, 100, 110)
        ])  # fmt: skip
    native.select_isa(before)
    assert (found[0][2] != 0).any() and found[0][-1].abs().max() > 2.0**90
    for others in found[1:]:
        for got, want in zip(others, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", range(1, 15))
def test_denormals_are_zero_in_every_instruction_set(rows: int) -> None:
    """Factors, products and sums at the bounds of float32's exponents, above and below."""
    x, w = randn(rows, 320).bfloat16(), randn(50, 320, seed=1)
    fmt = Dense(torch.bfloat16)
    before, found = native.isa, []
    for isa in native.available_isas():
        native.select_isa(isa)
        for small in (2.0**-126, 2.0**-124, 2.0**-118, 2.0**-65):
            packed = fmt.pack(w * small)
            found += [
                fmt.matmul(x * factor, packed, None, 50, out_dtype=torch.float32)
                for factor in (1.0, 2.0**-7, 2.0**-62)
            ]
    native.select_isa(before)
    cases = len(found) // len(native.available_isas())
    assert any((y == 0).any() and (y != 0).any() for y in found[:cases])
    for i in range(cases, len(found)):
        assert torch.equal(found[i], found[i % cases])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "k"), [(1, 300), (5, 300), (5, 320), (33, 300), (33, 320)])
@pytest.mark.usefixtures("isa")
def test_a_norm_before(name: str, rows: int, k: int) -> None:
    fmt, n = FORMATS[name], 50
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


@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(5, 320, 64), (17, 320, 64), (47, 700, 64), (530, 2080, 40), (531, 2080, 48), (530, 4224, 48)],
)
@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "w8a16", "w4a8", "w4a16-g32-asym", "nvfp4"])
def test_few_and_many_rows_by_tiles(name: str, rows: int, k: int, n: int) -> None:
    """Blocks of rows and of K, results made beside the products that follow, two rows at a time:
    the bits of vectors, with a gate, with a residual and alone, whole panels and a part of one."""
    fmt = FORMATS[name]
    x, w, bias = activations(name, rows, k), randn(2 * n, k, seed=1) / 9, randn(2 * n, seed=2)
    gated, plain = pack(fmt, w, True), pack(fmt, w)

    def products() -> tuple[Tensor, Tensor, Tensor]:
        residual = activations(name, rows, 2 * n)
        fmt.add_(residual, x, plain, bias)
        gate = fmt.matmul(x, gated, bias, n, activation="silu", gated=True)
        return gate, residual, fmt.matmul(x, plain, None, 2 * n)

    before, found = native.isa, {}
    for isa in native.available_isas():
        native.select_isa(isa)
        found[isa] = products()
    native.select_isa(before)
    want = found["avx2"]
    assert all(torch.equal(a, b) for got in found.values() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [8, 65536])
def test_every_gate_of_bfloat16(rows: int) -> None:
    """silu of all 65,536 values times some others, few and many at a time: the same everywhere."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    x = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    x[:, :1] = values
    x[:, 1] = 1.0
    w = torch.zeros(32, 32)
    w[:16, 0] = 1.0
    w[16:, 1] = 1.0 + torch.arange(16) / 128
    packed, before, found = pack(FORMATS["bfloat16"], w, True), native.isa, {}
    for isa in native.available_isas():
        native.select_isa(isa)
        parts = [
            FORMATS["bfloat16"].matmul(part, packed, None, 16, activation="silu", gated=True)
            for part in x.split(rows)
        ]
        found[isa] = torch.cat(parts)
    native.select_isa(before)
    for got in found.values():
        torch.testing.assert_close(got, found["avx2"], rtol=0, atol=0, equal_nan=True)
    sane = (values.abs() < 1e38)[:, 0]
    want = torch.nn.functional.silu(values[sane].double()) * w[16:, 1].double()
    torch.testing.assert_close(found["avx2"][sane].double(), want, rtol=8e-3, atol=1e-36)
    assert found["avx2"][values[:, 0].isnan()].isnan().all()


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "w4a8"])
@pytest.mark.usefixtures("isa")
def test_a_nan_stays_in_its_row_of_whole_panels(name: str) -> None:
    """Results are made two rows at a time: a NaN in one of them is in that one alone."""
    fmt, rows, k, n = FORMATS[name], 70, 320, 64
    sick = torch.zeros(rows, dtype=torch.bool)
    sick[[0, 3, 33, 66, 67, 69]] = True
    well, w = activations(name, rows, k), randn(2 * n, k, seed=1) / 9
    x = well.clone()
    x[sick, 7] = float("nan")
    gated, plain = pack(fmt, w, True), pack(fmt, w)
    residual, clean = torch.zeros(rows, 2 * n).bfloat16(), torch.zeros(rows, 2 * n).bfloat16()
    fmt.add_(residual, x, plain, None)
    fmt.add_(clean, well, plain, None)
    for got, want in (
        (residual, clean),
        (fmt.matmul(x, plain, None, 2 * n), fmt.matmul(well, plain, None, 2 * n)),
        (
            fmt.matmul(x, gated, None, n, activation="silu", gated=True),
            fmt.matmul(well, gated, None, n, activation="silu", gated=True),
        ),
    ):
        assert got[sick].isnan().all() and torch.equal(got[~sick], want[~sick])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"])
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
    elif activation == "relu2":
        want = x.relu().square().double()
    elif activation == "quick_gelu":
        want = x.double() * (1.702 * x.double()).sigmoid()
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


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("apart", [32, 1 << 20], ids=["overlapping", "far"])
@pytest.mark.usefixtures("isa")
def test_rows_any_number_of_values_apart(rows: int, apart: int) -> None:
    """Tiles read bfloat16 where it lies, but no rows that share values or lie far apart."""
    fmt = FORMATS["bfloat16"]
    values = randn(1, (rows - 1) * apart + 128).to(torch.bfloat16).flatten()
    x, packed = values.as_strided((rows, 128), (apart, 1)), pack(fmt, randn(48, 128, seed=1))
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
@pytest.mark.parametrize("rows", [6, 30])
@pytest.mark.usefixtures("isa")
def test_integers_at_their_ends(name: str, rows: int) -> None:
    """All-largest weights and rows: nothing saturates on the way."""
    fmt, k = FORMATS[name], 4864
    for sign in (1.0, -1.0):
        w = torch.full((16, k), sign)
        w[:, ::2] *= -1 if name.endswith("asym") else 1
        x = torch.ones(rows, k, dtype=torch.bfloat16)
        got = fmt.matmul(x, pack(fmt, w), None, 16, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), exact(x, name, w), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 6, 30])
@pytest.mark.usefixtures("isa")
def test_every_pair_of_bytes_is_multiplied_exactly(rows: int) -> None:
    """-128 too, which files may hold: sums of neighbours reach 2 · 128 · 127."""
    k = 256
    codes = torch.arange(-128, 128).to(torch.int8).repeat(16, 1)
    codes[::2] = codes[::2].flip(1)
    codes[3], codes[4] = -128, 127
    weight = codes.view(1, 16, k // 4, 4).transpose(1, 2).contiguous()  # [N/16, K/4, 16, 4]
    x = torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(rows))
    x[:, 0] = 127  # so that a row's scale is 1
    x[0] = torch.where(torch.arange(k) == 0, 127, -127)
    scale = torch.ones(1, 1, 16)
    got = ops.linear(
        x.bfloat16(), weight, scale, None, None, 16, row_codes=1, out_dtype=torch.float32
    )
    assert torch.equal(got.long(), x @ codes.long().t())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.usefixtures("isa")
def test_rows_of_a_quantized_table(name: str) -> None:
    fmt, table = FORMATS[name], randn(100, 172)
    packed, tokens = pack(fmt, table), torch.tensor([0, 99, 5, 5, 17], dtype=torch.int32)
    if name.endswith("rotated"):
        with pytest.raises(WeightsError, match="aren't those of an embedding"):
            fmt.gather(tokens, packed, 172, 1.0)
        return
    whole = fmt.unpack(packed, 100, 172)[tokens.long()].to(torch.bfloat16)
    assert torch.equal(fmt.gather(tokens, packed, 172, 1.0), whole)
    scaled = (whole.float() * 7.5).to(torch.bfloat16)
    assert torch.equal(fmt.gather(tokens, packed, 172, 7.5), scaled)


@pytest.mark.parametrize("k", [1, 33, 64, 172, 704])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("isa")
def test_rotation(k: int, dtype: torch.dtype) -> None:
    """The same bits as the reference, and the products of what was given."""
    x = randn(19, 2 * k).to(dtype)[:, k:]  # strided rows
    got = ops.rotate(x)
    assert torch.equal(got, ops.op("rotate").reference(x))
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for i in range(64)] for j in range(64)])
    wide = torch.nn.functional.pad(x.double(), (0, -k % 64)).unflatten(1, (-1, 64))
    want = (wide @ hadamard.double() / 8).flatten(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ops.rotate(got)[:, :k], x.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("isa")
def test_rotated_rows_lose_less_where_some_values_stand_out() -> None:
    x, w = randn(30, 704), randn(50, 704, seed=1)
    x[:, 5::97] *= 30
    loss = {}
    for name in ("w8a8", "w8a8-rotated"):
        got = FORMATS[name].matmul(x.bfloat16(), pack(FORMATS[name], w), None, 50)
        loss[name] = float((got.double() - x.bfloat16().double() @ w.double().t()).square().mean())
    assert loss["w8a8-rotated"] < 0.4 * loss["w8a8"]


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
    refused("bfloat16 rows", x, q, scale, None, None, 32, 1)
    refused("float16 or float32", x.bfloat16(), q, scale[:1], None, None, 32, 1)
    refused(r"isn't the packed form of \[48, 64\]", x.bfloat16(), q, scale, None, None, 48, 1)
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
        1,
    )
    refused("activation 9", x.bfloat16(), q, scale, None, None, 32, 1, None, 0.0, 9)
    refused("row_codes 5", x.bfloat16(), q, scale, None, None, 32, 5)
    eight_zero = torch.zeros_like(scale, dtype=torch.uint8)
    refused("go with zero points", x.bfloat16(), q, scale, eight_zero, None, 32, 4)
    refused("rows in E4M3 need weights in E4M3", x.bfloat16(), q, scale, None, None, 32, 2)
    eight = FORMATS["fp8-block"].pack(w)
    refused(
        "int8 rows need weights of integers",
        x.bfloat16(), eight["weight"], eight["scale"], None, None, 32, 1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="residual has 3 rows, x has 2"):
        ops.linear_add_(torch.zeros(3, 32).bfloat16(), x.bfloat16(), q, scale, None, None)


@pytest.mark.parametrize("row_codes", [0, 1])
@pytest.mark.parametrize(("bits", "groups"), [(8, 2), (8, 4), (4, 2)])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("isa")
def test_groups_longer_than_a_block(row_codes: int, bits: int, groups: int, rows: int) -> None:
    """Of any length that the operator takes, not only those that a format has."""
    k, n = 8192, 48
    draw = torch.Generator().manual_seed(groups)
    if bits == 8:
        weight = torch.randint(-127, 128, (n // 16, k // 4, 16, 4), generator=draw).to(torch.int8)
    else:
        weight = torch.randint(0, 256, (n // 16, k // 8, 16, 4), generator=draw).to(torch.uint8)
    scale = torch.rand(n // 16, groups, 16, generator=draw) / k
    x = activations("w8a16", rows, k)
    args = (x, weight, scale, None, None, n, row_codes)
    got, want = ops.op("linear").call(*args), ops.op("linear").reference(*args)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("group", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("row_codes", [0, 1])
@pytest.mark.usefixtures("isa")
def test_groups_of_many_rows(group: int, bits: int, row_codes: int) -> None:
    """As few rows have them, in groups of any number of tiles, several blocks of them."""
    n, k, rows = 80, 15 * group, 130
    draw = torch.Generator().manual_seed(group)
    shape = (n // 16, k * bits // 32, 16, 4)
    weight = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    if bits == 8:
        weight = weight.view(torch.int8)
    scale = torch.rand(n // 16, k // group, 16, generator=draw) / k
    x = activations("w8a16", rows, k)

    def product(first: int, last: int) -> Tensor:
        return ops.linear(x[first:last], weight, scale, None, None, n, row_codes)

    together = product(0, rows)
    for first, last in [(0, 1), (31, 33), (112, 130), (60, 126)]:
        assert torch.equal(product(first, last), together[first:last])


def test_a_panel_cut_short_is_refused() -> None:
    x, weight = activations("bfloat16", 5, 48), torch.zeros(1, 24, 16, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="a panel of 48 values of K, which must be a multiple"):
        ops.linear(x, weight, None, None, None, 16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("isa")
def test_every_code_of_eight_bits(dtype: torch.dtype, rows: int) -> None:
    """One in each row of W, in each place of K in turn: what torch's cast says."""
    scheme = parse_scheme("fp8" if dtype is torch.float8_e4m3fn else "fp8-e5m2")
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    finite = every[every.float().isfinite()]
    fmt, k = format_of(scheme), 64
    values = torch.zeros(len(finite), k, dtype=dtype)
    place = torch.arange(len(finite)) * 7 % k
    values.view(torch.uint8)[torch.arange(len(finite)), place] = finite.view(torch.uint8)
    scale = torch.full((len(finite), 1), 0.75)
    packed = fmt.pack_codes(Codes(scheme, values, scale))
    x = torch.ones(rows, k).bfloat16()
    got = fmt.matmul(x, packed, None, len(finite), out_dtype=torch.float32)
    assert torch.equal(got, (finite.float() * 0.75).expand(rows, -1))


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("isa")
def test_every_level_under_every_scale(name: str, rows: int) -> None:
    """All sixteen codes, each times all scales that its format has."""
    scheme, k, x = parse_scheme(name), 64, torch.ones(rows, 64).bfloat16()
    if name == "nf4":
        scales = torch.logspace(-20, 10, 40, base=2.0).half().float()
    elif name == "mxfp4":
        scales = torch.pow(2.0, torch.arange(-120, 121))
    else:
        scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    n = 16 * len(scales)
    values = torch.full((n, k), 7 if name == "nf4" else 0, dtype=torch.uint8)
    values[torch.arange(n), torch.arange(n) * 5 % k] = torch.arange(16).repeat(len(scales)).byte()
    own = scales.repeat_interleave(16)[:, None].expand(n, -(-k // scheme.group)).contiguous()
    outer = torch.full((n,), 0.625) if name == "nvfp4" else None
    fmt = format_of(scheme)
    packed = fmt.pack_codes(Codes(scheme, values, own, None, outer))
    level = torch.tensor(NF4 if name == "nf4" else E2M1).bfloat16().float()
    want = (scales[:, None] * level).flatten() * (1.0 if outer is None else 0.625)
    got = fmt.matmul(x, packed, None, n, out_dtype=torch.float32)
    assert torch.equal(got, want.expand(rows, -1))


@pytest.mark.usefixtures("isa")
def test_static_rows_are_divided_by_their_scale() -> None:
    """round(x / s) within ±127, halves to even; then s again: through a weight of ones."""
    scheme, k = parse_scheme("w8a8-static"), 64
    fmt = format_of(scheme)
    weight = torch.zeros(16, k)
    weight[:, 5] = 127.0
    packed = fmt.pack_codes(quantize(weight, scheme, 0.5))
    points = [0.0, 0.25, 0.75, 1.25, -0.25, -0.75, 3.1, 63.5, 63.75, 64.0, 1e30, -1e30, -63.75]
    x = torch.zeros(len(points), k).bfloat16()
    x[:, 5] = torch.tensor(points).bfloat16()
    q = torch.round(x[:, 5].double() / 0.5).clamp(-127, 127)
    for rows in (slice(None), slice(1), slice(2, 5)):
        got = fmt.matmul(x[rows], packed, None, 16, out_dtype=torch.float32)
        assert torch.equal(got.double(), (q[rows] * 127 * 0.5)[:, None].expand(-1, 16))


def identity(scheme: str, k: int, input_scale: float | None) -> tuple[WeightFormat, Packed]:
    """A weight [k, k] of ones on its diagonal, in E4M3 with scales of 1."""
    parsed = parse_scheme(scheme)
    values, count = torch.eye(k).to(torch.float8_e4m3fn), -(-k // (parsed.group or k))
    codes = Codes(parsed, values, torch.ones(k, count), input_scale=input_scale)
    fmt = format_of(parsed)
    return fmt, fmt.pack_codes(codes)


@pytest.mark.parametrize("input_scale", [1.0, 2.0**-7, 0.0123, 37.5])
@pytest.mark.usefixtures("isa")
def test_every_activation_rounds_as_torch_casts(input_scale: float) -> None:
    """All finite values of bfloat16, ties among them, through the identity."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(every.isfinite() & (every.abs() > 2.0**-100), every, 0.0).view(-1, 256)
    fmt, packed = identity("fp8-w8a8-static", 256, input_scale)
    scale = packed["input_scale"]
    want = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    for rows in (x, x[7:8], x[100:103]):
        first = 0 if rows is x else 7 if len(rows) == 1 else 100
        got = fmt.matmul(rows, packed, None, 256, out_dtype=torch.float32)
        assert torch.equal(got, want[first : first + len(rows)])


@pytest.mark.parametrize("scheme", ["fp8-w8a8", "fp8-w8a8-block"])
@pytest.mark.usefixtures("isa")
def test_each_token_has_its_scales(scheme: str) -> None:
    """max|x| / 448 of a row, or of 128 values of it; that of zeros is 1."""
    k, group = 256, 128 if scheme.endswith("block") else 256
    x = (randn(40, k) * torch.logspace(-20, 20, 40, base=2.0)[:, None]).bfloat16()
    x[3], x[4, :128] = 0, 0
    x[5, 130] = 3000.0
    parts = x.float().view(40, -1, group)
    top = parts.abs().amax(-1, keepdim=True)
    own = torch.where(top > 0, top / 448.0, 1.0)
    want = ((parts / own).clamp(-448, 448).to(torch.float8_e4m3fn).float() * own).view(40, k)
    fmt, packed = identity(scheme, k, None)
    for rows in (slice(40), slice(1), slice(3, 6)):
        got = fmt.matmul(x[rows], packed, None, k, out_dtype=torch.float32)
        assert torch.equal(got, want[rows])


@pytest.mark.parametrize("name", ["fp8-w8a8", "fp8-w8a8-block", "fp8-w8a8-tensor-static"])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.usefixtures("isa")
def test_products_of_two_e4m3_bit_for_bit(name: str, rows: int) -> None:
    """The order of additions in torch: products are exact, so its float32 sums are FMAs'."""
    fmt, (k, n) = FORMATS[name], (300, 50)
    assert isinstance(fmt, Quantized)
    x, packed = activations(name, rows, k), pack(fmt, randn(n, k, seed=1))
    codes, bias = fmt.codes(packed, n, k), randn(n, seed=2)
    groups, padded = packed["scale"].shape[1], packed["weight"].shape[1] * 4
    q, scale = quantize_rows_e4m3(x, groups, padded, packed.get("input_scale"))
    q, w = (torch.nn.functional.pad(t.float(), (0, padded - k)) for t in (q, codes.values))
    total = torch.zeros(rows, n)
    for g in range(groups):
        acc = torch.zeros(rows, n)
        for at in range(g * padded // groups, (g + 1) * padded // groups, 32):
            halves = []
            for odd in (0, 1):
                half = torch.zeros(rows, n)
                for i in range(at + odd, at + 32, 2):
                    half = half + q[:, i, None] * w[None, :, i]
                halves.append(half)
            acc = acc + (halves[0] + halves[1])
        scaled = (acc * scale[:, g, None]).double() * codes.scale[:, g].double()
        total = (total.double() + scaled).float()
    got = fmt.matmul(x, packed, bias, n, out_dtype=torch.float32)
    assert torch.equal(got, total + bias)


def test_sums_that_may_not_fit_are_refused() -> None:
    """127 · 128 · 131,072 still fits into 32 bits."""
    fmt = FORMATS["w8a8"]
    most = 131_072
    x = torch.ones(1, most + 64, dtype=torch.bfloat16)
    kept = fmt.pack(torch.full((1, most), 127.0))
    (sum_,) = fmt.matmul(x[:, :most], kept, None, 1).tolist()
    assert sum_ == [127.0 * most]
    with pytest.raises(RuntimeError, match="more than 131072 products of 8 bits"):
        fmt.matmul(x, fmt.pack(torch.full((1, most + 64), 127.0)), None, 1)

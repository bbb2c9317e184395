"""K-quants in records: the blocks' own values, and products to the bit.

References: the `gguf` package for what blocks stand for, dense panels of those values for rows of
floats, and sums in Python's integers for rows of int8.
"""

from __future__ import annotations

from itertools import count

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import WeightsError
from penstock.kernels import native
from penstock.ops import op, pack_records
from penstock.ops.linear import ROW_CODES, quantize_rows
from penstock.ops.norm import rms
from penstock.ops.records import BLOCK_BYTES, VALUES, mix, read_blocks, unpack_records, values_of
from penstock.quant import ROWS, Codes, Dense, Scheme, format_of, parse_scheme
from penstock.quant.codes import mixture
from penstock.quant.methods.rtn import quantize
from penstock.quant.scheme import Kind

from ..exactness.bits import digest, integers, uniform

KINDS: dict[int, Kind] = {4: "q4_k", 5: "q5_k", 6: "q6_k"}
BLOCKS = ROW_CODES.index("int8_blocks")
HALVES = {4: (0, 2), 5: (0, 2), 6: (208,)}
"""Where a block's float16 are."""
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


def blocks(rows: int, per_row: int, bits: int, seed: int = 0) -> Tensor:
    """[rows, bytes]: every code and scale there is."""
    random = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (rows, per_row, BLOCK_BYTES[bits]), dtype=torch.uint8, generator=random
    )
    for at in HALVES[bits]:
        scale = torch.randn(rows, per_row, 1, generator=random) / 100
        raw[..., at : at + 2] = scale.half().view(torch.uint8)
    return raw.flatten(1)


def matrix(bits: int, n: int = 96, per_row: int = 3, seed: int = 0) -> Codes:
    """0: a mixture of all three, 16 rows of each in turns."""
    if bits:
        scheme = Scheme(KINDS[bits], VALUES, activations="int8_blocks")
        return Codes(scheme, blocks(n, per_row, bits, seed), torch.empty(n, 0))
    parts = (matrix((4, 6, 5)[i // 16 % 3], min(16, n - i), per_row, i) for i in range(0, n, 16))
    return Codes.stack([part.mixed() for part in parts])


def rows(count: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: Tensor, codes: Codes, row_codes: int, **more: object) -> Tensor:
    packed = pack_records(codes.values, codes.scheme.bits)
    args = (x, packed, None, None, None, codes.shape[0], row_codes)
    return ops.linear(*args, out_dtype=torch.float32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", KINDS)
def test_values_are_ggufs(bits: int) -> None:
    raw = blocks(48, 5, bits)
    there = getattr(gguf.GGMLQuantizationType, KINDS[bits].upper())
    assert np.array_equal(values_of(raw, bits).numpy(), gguf.quants.dequantize(raw.numpy(), there))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [96, 56, 10])
@pytest.mark.parametrize("bits", [0, *KINDS])
def test_records_hold_the_blocks(bits: int, n: int, gated: bool) -> None:
    codes = matrix(bits, 2 * n if gated and (bits or n % 16 == 0) else n)
    if codes.shape[0] == n:
        gated = False
    held = format_of(codes.scheme)
    packed = held.pack_codes(codes, gated)
    assert torch.equal(packed["weight"], op("pack_records").reference(codes.values, bits, gated))
    assert torch.equal(held.unpack(packed, n, codes.shape[1], gated), codes.dequantize())
    assert packed["weight"].nbytes == held.nbytes(n, codes.shape[1]) * (2 if gated else 1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 17, 40, 130])
@pytest.mark.parametrize("bits", [0, *KINDS])
@pytest.mark.usefixtures("isa")
def test_floats_are_multiplied_as_by_the_widened_matrix(bits: int, count: int) -> None:
    codes = matrix(bits)
    dense = ops.pack(codes.dequantize().bfloat16(), torch.bfloat16)
    x = rows(count, codes.shape[1])
    want = ops.linear(x, dense, None, None, None, 96, out_dtype=torch.float32)
    assert torch.equal(product(x, codes, 0), want)


def by_integers(x: Tensor, codes: Codes) -> Tensor:
    """x · Wᵀ as `ops.linear` says it is summed, of one row."""
    found = read_blocks(codes.values, codes.scheme.bits)
    n, records, groups = found.factor.shape
    total = np.zeros(n, dtype=np.float32)

    def add(sums: np.ndarray, scale: np.ndarray) -> None:
        nonlocal total  # a product of two float32 is exact in float64
        exact = sums.astype(np.float32).astype(np.float64) * scale.astype(np.float64)
        total = (exact + total).astype(np.float32)

    for i in range(records):
        q, scale = quantize_rows(x[:, i * VALUES : (i + 1) * VALUES])
        q = q.view(groups, -1).numpy().astype(np.int64)
        s = scale.numpy()[0]
        w = found.codes[:, i].view(n, groups, -1).numpy().astype(np.int64)
        w -= 0 if found.minimum is not None else 32
        factor = found.factor[:, i].numpy().astype(np.int64)
        add(((w * q).sum(2) * factor).sum(1), found.d[:, i].float().numpy() * s)
        if found.minimum is not None and found.least is not None:
            minimum = found.minimum[:, i].numpy().astype(np.int64)
            add((minimum * q.sum(1)).sum(1), -found.least[:, i].float().numpy() * s)
    return torch.from_numpy(total)


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.usefixtures("isa")
@needs_native
def test_int8_rows_are_summed_exactly(bits: int) -> None:
    codes = matrix(bits, per_row=4)
    for seed in range(3):
        x = rows(1, codes.shape[1], seed)
        assert torch.equal(product(x, codes, BLOCKS)[0], by_integers(x.float(), codes))


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.usefixtures("isa")
@needs_native
def test_the_largest_sums_fit(bits: int) -> None:
    """All codes, factors and rows at their ends, both ways."""
    codes = matrix(bits, 16, 2)
    raw = codes.values.view(16, 2, -1)
    raw[:] = 255
    if bits == 6:
        raw[:8, :, 192:208], raw[8:, :, 192:208] = 127, 128  # int8 factors
    for at in HALVES[bits]:
        raw[..., at : at + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    for sign in (1.0, -1.0):
        x = torch.full((20, 512), sign).bfloat16()
        got = product(x, codes, BLOCKS)
        assert torch.equal(got, by_integers(x[:1].float(), codes).expand(20, -1))
        assert torch.equal(product(x[:5], codes, BLOCKS), got[:5])


@pytest.mark.parametrize("bits", [0, *KINDS])
@pytest.mark.usefixtures("isa")
def test_rows_by_themselves_and_together(bits: int) -> None:
    codes = matrix(bits)
    x = rows(70, codes.shape[1])
    together = product(x, codes, BLOCKS)
    for first, last in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 33), (33, 70)]:
        assert torch.equal(product(x[first:last], codes, BLOCKS), together[first:last])
    for some in range(4, 26):
        assert torch.equal(product(x[:some], codes, BLOCKS), together[:some])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [0, *KINDS])
@pytest.mark.usefixtures("isa")
@needs_native
def test_more_panels_than_tiles_take_together(bits: int, gated: bool) -> None:
    """Of 24 tiles of rows, 21 panels."""
    n, seeds = 200 if gated else 400, count(2)
    parts = [matrix(bits, n, 2, seed=next(seeds)) for _ in range(1 + gated)]
    packed = format_of(parts[0].scheme).pack_codes(Codes.stack(parts), gated)["weight"]
    x = rows(370, 512)

    def some(first: int, last: int) -> Tensor:
        return ops.linear(
            x[first:last],
            packed,
            None,
            None,
            None,
            n,
            BLOCKS,
            None,
            0.0,
            int(gated),
            gated,
            torch.float32,
        )

    together = some(0, 370)
    for first, last in [(0, 1), (30, 34), (352, 370)]:
        assert torch.equal(some(first, last), together[first:last])


@needs_native
@pytest.mark.parametrize("row_codes", [0, BLOCKS])
@pytest.mark.parametrize("bits", [0, *KINDS])
def test_instruction_sets_agree(bits: int, row_codes: int) -> None:
    codes = matrix(bits)
    x, before, found = rows(33, codes.shape[1]), native.isa, []
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            found.append(product(x, codes, row_codes))
    finally:
        native.select_isa(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("row_codes", [0, BLOCKS])
@pytest.mark.parametrize("bits", [0, *KINDS])
def test_the_reference_agrees(bits: int, row_codes: int) -> None:
    """Of a gated product with a norm and a bias, and added to a residual."""
    n, seeds = 48, count(1)
    codes = Codes.stack([matrix(bits, n, seed=next(seeds)), matrix(bits, n, seed=next(seeds))])
    k = codes.shape[1]
    packed = format_of(codes.scheme).pack_codes(codes, gated=True)["weight"]
    x, norm, bias = rows(5, k), rows(1, k).float()[0].abs(), torch.randn(2 * n)
    args = (x, packed, None, None, bias, n, row_codes, norm, 1e-5, 1, True, torch.float32)
    got, want = op("linear").call(*args), op("linear").reference(*args)
    torch.testing.assert_close(got, want, rtol=6e-2, atol=6e-2)
    whole = pack_records(codes.values, bits)
    normed, sums = rms(x, norm, 1e-5), [torch.zeros(5, 2 * n, dtype=torch.bfloat16) for _ in "ab"]
    ops.linear_add_(sums[0], normed, whole, None, None, None, row_codes)
    op("linear_add_").reference(sums[1], normed, whole, None, None, None, row_codes)
    torch.testing.assert_close(*sums, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bits", [0, *KINDS])
@pytest.mark.usefixtures("isa")
def test_rows_are_looked_up(bits: int) -> None:
    codes = matrix(bits)
    packed = pack_records(codes.values, bits)
    ids = torch.tensor([0, 5, 95, 17, 33, 47], dtype=torch.int32)
    want = codes.dequantize()[ids.long()].bfloat16()
    assert torch.equal(ops.embedding(ids, packed, codes.shape[1]), want)
    assert torch.equal(op("embedding").reference(ids, packed, codes.shape[1], 1.0), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.usefixtures("isa")
def test_a_row_that_isnt_finite_spoils_itself_alone(value: float) -> None:
    codes = matrix(4)
    x = rows(6, codes.shape[1])
    want = product(x, codes, BLOCKS)
    x[2, 300] = value
    got = product(x, codes, BLOCKS)
    assert got[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(got[kept], want[kept])


def test_what_doesnt_fit_is_refused() -> None:
    codes = matrix(4)
    packed = pack_records(codes.values, 4)
    scale = torch.ones(6, 1, 16)
    if native.handle is not None:
        x = rows(2, 768)
        with pytest.raises(RuntimeError, match="or in blocks K-quants"):
            ops.linear(x, packed, None, None, None, 96, ROW_CODES.index("int8"))
        with pytest.raises(RuntimeError, match="come without scales"):
            ops.linear(x, packed, scale, None, None, 96)
        with pytest.raises(RuntimeError, match="take bfloat16 rows"):
            ops.linear(x.float(), packed, None, None, None, 96)
        with pytest.raises(RuntimeError, match="37, 45, 53 or 54 lines"):
            ops.linear(x, packed[:, :, :36].contiguous(), None, None, None, 96)
        with pytest.raises(RuntimeError, match="of 7 bits"):
            pack_records(codes.values, 7)
        with pytest.raises(RuntimeError, match="blocks of 144 bytes"):
            pack_records(codes.values[:, :-1].contiguous(), 4)
    with pytest.raises(WeightsError, match="aren't rounded to q4_k"):
        format_of(codes.scheme).pack(torch.randn(16, 256))
    codes.values[3, :2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    with pytest.raises(WeightsError, match=r"1 scales of a matrix .* are NaN or infinite"):
        format_of(codes.scheme).pack_codes(codes)


def test_a_mixture_is_of_its_parts() -> None:
    parts = [matrix(4, 32), matrix(6, 16), matrix(5, 16)]
    whole = Codes.stack(parts)
    assert whole.scheme == mixture([part.scheme for part in parts])
    assert whole.shape == (64, 768)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(whole.rows(slice(32, 48)).dequantize(), parts[1].dequantize())
    assert torch.equal(mix(whole.values, 0), whole.values)
    single = format_of(whole.scheme).pack_codes(parts[1])["weight"]  # a lone part as one of many
    assert torch.equal(unpack_records(single, 16, 768), parts[1].dequantize())


def test_parts_that_dont_fit_together_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"by whole 16 rows, not \[24\]"):
        Codes.stack([matrix(4, 24), matrix(6, 24)])
    assert torch.equal(  # the last may end anywhere
        Codes.stack([matrix(4, 16), matrix(6, 24)]).dequantize()[16:], matrix(6, 24).dequantize()
    )
    whole = quantize(torch.randn(16, 768), parse_scheme("w8a8"))
    with pytest.raises(WeightsError, match=r"q4_k-a8, w8a8 can't be stacked"):
        Codes.stack([matrix(4, 16), whole])


@pytest.mark.parametrize("bits", [0, *KINDS])
def test_values_are_computed_a_part_at_a_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = matrix(bits)
    want = codes.dequantize()
    monkeypatch.setattr("penstock.ops.records._AT_ONCE", 768 * 20)
    assert torch.equal(codes.dequantize(), want)


GOLDEN = {
    (4, 0): "f1320c4ad15cd75d497d8912e10cb4bad3f8e5d88409f40d748dab12d4584ecc",
    (4, BLOCKS): "278b93a4fa6e9ff119509270bf2d70955ae1a75b33a95f0d0b6f178a23b4c444",
    (5, 0): "b79be4a4af1b62ca4d3079631963646c846addb2e266705a6740297cdeab9719",
    (5, BLOCKS): "4568c2ba7d8d904e2429ea1227e258783e194e07e7e218ac99b773647859f10e",
    (6, 0): "1ac16f4288e8d5eba980a9646efec507c940eeeaa9c034318701005e1fced7a1",
    (6, BLOCKS): "179271351dcab039b5a4c5aa69181ca21f3ce81e067a83a7acef08aa82950775",
}
"""sha256 of products of fixed blocks and rows: every machine and instruction set gives these."""


@pytest.mark.parametrize(("bits", "row_codes"), GOLDEN)
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.usefixtures("isa")
@needs_native
def test_golden_bits(count: int, bits: int, row_codes: int) -> None:
    raw = (integers(48 * 3 * BLOCK_BYTES[bits], bits) & np.uint64(255)).astype(np.uint8)
    each = torch.from_numpy(raw).view(48, 3, -1)
    for at in HALVES[bits]:
        each[..., at : at + 2] = uniform((48, 3, 1), 0.01, bits + at).half().view(torch.uint8)
    scheme = Scheme(KINDS[bits], VALUES, activations="int8_blocks")
    codes = Codes(scheme, each.flatten(1), torch.empty(48, 0))
    x = uniform((40, 768), 2.0, 9).bfloat16()
    got = product(x[:count], codes, row_codes)
    assert torch.equal(got, product(x, codes, row_codes)[:count])
    assert digest(product(x, codes, row_codes)) == GOLDEN[bits, row_codes]


def test_in_rows_values_are_widened() -> None:
    codes = matrix(4)
    held = format_of(codes.scheme).stored_as(ROWS)
    assert held == Dense(torch.bfloat16, ROWS)
    assert torch.equal(held.pack_codes(codes)["weight"], codes.dequantize().bfloat16())

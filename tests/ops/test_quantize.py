"""`quantize_int8` and `quantize_int4`: native == reference, and both what their docstrings say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.ops.quantize import INT4_PARTS
from penstock.ops.stored import unpack_quantized

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (16, 64), (7, 100), (33, 31), (50, 300), (40, 1000), (96, 129)]
WAYS = [(group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]

needs_native = pytest.mark.skipif(
    native.handle is None, reason=f"no native kernels: {native.reason}"
)


def weights(dtype: torch.dtype) -> Iterator[Tensor]:
    """Of odd shapes and every size, with ties, zeros, denormals and lone outliers among them."""
    generator = torch.Generator().manual_seed(3)
    for n, k in SHAPES:
        w = torch.randn(n, k, generator=generator)
        for scale in (1.0, 0.02, 1e-4, 3e-7, 1e-20, 1e-30, 1e-37, 1e-39, 1e-44, 3e4, 1e5):
            yield (w * scale).clamp(-65504, 65504).to(dtype)
        yield torch.round(w * 4).to(dtype)  # many ties
        outliers = w * torch.exp(3 * torch.randn(n, k, generator=generator))
        yield outliers.clamp(-65504, 65504).to(dtype)
        sparse = torch.where(torch.rand(n, k, generator=generator) < 0.02, w, 0.0)
        yield sparse.to(dtype)
        yield torch.zeros(n, k, dtype=dtype)
        yield (torch.ones(n, k) * w.sign()).to(dtype)
        if dtype is not torch.float16:
            yield (w / w.abs().max() * 5e5).to(dtype)  # scales near the end of float16


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert torch.equal(g.view(torch.uint8), w.contiguous().view(torch.uint8))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_int8_is_the_reference(dtype: torch.dtype) -> None:
    op = ops.op("quantize_int8")
    for w in weights(dtype):
        same(op.call(w), op.reference(w))
        same(op.call(torch.cat((w, -w)), True), op.reference(torch.cat((w, -w)), True))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "symmetric"), WAYS)
@pytest.mark.usefixtures("isa")
def test_int4_is_the_reference(dtype: torch.dtype, group: int, symmetric: bool) -> None:
    op = ops.op("quantize_int4")
    for w in weights(dtype):
        same(op.call(w, group, symmetric), op.reference(w, group, symmetric))
    w = torch.randn(2 * 37, 200, generator=torch.Generator().manual_seed(5)).to(dtype)
    same(op.call(w, group, symmetric, True), op.reference(w, group, symmetric, True))


@needs_native
@pytest.mark.usefixtures("isa")
def test_strided_rows_and_threads() -> None:
    wide = torch.randn(70, 400, generator=torch.Generator().manual_seed(1)).bfloat16()
    part, threads = wide[3:63, 100:350], torch.get_num_threads()
    want = (*ops.quantize_int8(part.contiguous()), *ops.quantize_int4(part.contiguous(), 32, True))
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            same((*ops.quantize_int8(part), *ops.quantize_int4(part, 32, True)), want)
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.usefixtures("isa")
def test_flushing_denormals_changes_nothing() -> None:
    sizes = torch.tensor([1e-30, 1e-36, 1e-38, 1e-39, 1.0, 3e-8])
    w = torch.randn(16, 6, 64, generator=torch.Generator().manual_seed(1)) * sizes[:, None]
    w = w.flatten(1)

    def everything() -> tuple[Tensor, ...]:
        int4 = (*ops.quantize_int4(w, 32, True), *ops.quantize_int4(w, 64, False))
        return *ops.quantize_int8(w), *int4

    want = everything()
    assert torch.set_flush_denormal(True)
    try:
        same(everything(), want)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_errors_of_rounding(name: str) -> None:
    """No value is further off than its step says, and of four scales the best was taken."""
    ways = (ops.implementations(n) for n in ("quantize_int8", "quantize_int4"))
    int8, int4 = (w.get(name) for w in ways)
    if int8 is None or int4 is None:
        pytest.skip("no native kernels")
    n, k = 48, 320
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(9))
    q, scale = int8(w)
    off = (unpack_quantized(q, scale, None, 0, None, n, k) - w).abs()
    assert bool((off <= scale.flatten()[:, None] * 0.50001).all())
    assert torch.equal(scale.flatten(), w.abs().amax(1) / torch.full((n,), 127.0))

    q, scale, zero = int4(w, 32, False)
    off = (unpack_quantized(q, scale, zero, 0, None, n, k) - w).abs().unflatten(1, (-1, 32))
    by_row = scale.float().permute(0, 2, 1).reshape(n, -1, 1)
    assert bool((off <= by_row * 1.01).all())  # a zero point that was rounded adds half a step

    q, scale, zero = int4(w, 32, True)
    assert zero.numel() == 0
    groups = w.unflatten(1, (-1, 32)).double()
    found = unpack_quantized(q, scale, None, 0, None, n, k).unflatten(1, (-1, 32))
    lost = (found - groups).square().sum(-1)
    top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    least = torch.full_like(lost, torch.inf)
    for part in INT4_PARTS:
        step = (-top / part).half().double()
        rounded = torch.round(groups / step).clamp(-8, 7) * step
        least = torch.minimum(least, (rounded - groups).square().sum(-1))
    torch.testing.assert_close(lost, least, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_mark_their_scale(name: str, bad: float) -> None:
    for dtype in DTYPES:
        w = torch.randn(20, 100, generator=torch.Generator().manual_seed(2)).to(dtype)
        w[17, 70] = bad
        for op, args in [
            ("quantize_int8", ()),
            ("quantize_int4", (32, True)),
            ("quantize_int4", (64, False)),
        ]:
            call = ops.implementations(op).get(name)
            if call is None:
                pytest.skip("no native kernels")
            finite = call(w, *args)[1].float().isfinite()
            assert not bool(finite[1, :, 1].all())
            finite[1, :, 1] = True
            assert bool(finite.all())


def test_bad_arguments_are_refused() -> None:
    w = torch.randn(3, 64)
    for call in ops.implementations("quantize_int4").values():
        with pytest.raises(RuntimeError, match="group 48 isn't 32, 64 or 128"):
            call(w, 48, True)
    for op, args in [("quantize_int8", ()), ("quantize_int4", (32, True))]:
        for call in ops.implementations(op).values():
            with pytest.raises(RuntimeError, match="two halves, this one 3 rows"):
                call(w, *args, True)

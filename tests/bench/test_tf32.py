"""TF32's products on a CPU, and float16 by references."""

from __future__ import annotations

import pytest
import torch

from penstock import LLM, ops
from penstock.bench.drift import measure_drift
from penstock.bench.reader import open_reader
from penstock.bench.texts import Text
from penstock.bench.tf32 import Tf32, rounded
from penstock.bench.variant import Variant
from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.ops.panels import pack_panels

STORY = "Once upon a time, there was a little girl named Lily. She loved to play in the park. "


def test_ten_bits_of_mantissa() -> None:
    """By the definition, in float64: to the nearest multiple of 2^(e − 10), halves away from 0."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -30, 30, 10_000
    )
    x = torch.cat((x, torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 2**-10 + 2**-11, 0.0, 3.0])))
    exact = x.double()
    _, exponent = torch.frexp(exact)
    step = torch.ldexp(torch.ones_like(exact), exponent - 11)
    want = torch.sign(exact) * torch.floor(exact.abs() / step + 0.5) * step
    assert torch.equal(rounded(x).double(), want)
    assert rounded(torch.tensor([1 + 2**-11])).item() == 1 + 2**-10
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(rounded(odd)[:2], odd[:2]) and rounded(odd)[2].isnan()


def test_products_are_of_rounded_operands() -> None:
    random = torch.Generator().manual_seed(1)
    x, weight = torch.randn(5, 64, generator=random), torch.randn(32, 64, generator=random)
    norm = torch.rand(64, generator=random)
    packed = pack_panels(weight)

    def product(by: torch.Tensor | None) -> torch.Tensor:
        return ops.linear(x, packed, None, None, None, 32, 0, by, 1e-6)

    with Tf32():
        plain, normed = product(None), product(norm)
    want = rounded(x).double() @ rounded(weight).double().T
    torch.testing.assert_close(plain.double(), want, rtol=1e-5, atol=1e-5)
    want = rounded(ops.rms_norm(x, norm, 1e-6)).double() @ rounded(weight).double().T
    torch.testing.assert_close(normed.double(), want, rtol=1e-5, atol=1e-5)
    assert (product(None) - plain).abs().max() > 1e-4


def test_drifts_by_mantissa() -> None:
    """tf32 and float16, of 10 bits, drift far less than bfloat16, of 7."""
    lost = {}
    with open_reader(Variant.parse("stories:float32"), 64) as a:
        texts = [Text("story", a.encode([STORY]))]
        for dtype in ("tf32", "float16", "bfloat16"):
            with open_reader(Variant.parse(f"stories:{dtype}"), 64) as b:
                found = measure_drift(a, b, texts, window=64, stride=32)
                lost[dtype] = found.kl
                if dtype == "float16":
                    assert b.about.kernels == "reference" and b.about.cache == "float16"
    assert 0 < lost["tf32"] < lost["bfloat16"] / 10 and 0 < lost["float16"] < lost["bfloat16"] / 10


@pytest.mark.skipif(native.handle is None, reason="references compute in it")
@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_no_kernel_computes_in_float16(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"{dtype}.*no kernel computes in float16.*'float32'"):
        LLM("stories", dtype=dtype)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("stories:tf32,w8a8", "so w8a8 can't take effect"),
        ("stories:tf32,graph", "so graph can't take effect"),
        ("stories:float16,isa=avx2", "kernels=reference runs none"),
    ],
)
def test_refusals(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Variant.parse(words)

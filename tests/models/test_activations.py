"""`a8` and `a16`: what rows are rounded to beside matrices that are quantized already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.activations import Activated, Widened
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.quant import Codes, Scheme, format_of, parse_scheme
from penstock.quant.methods.rtn import quantize


class Held:
    """A source of one matrix for each scheme, by the schemes' names; `plain` isn't quantized."""

    path, config = Path("checkpoint"), dict[str, Any]()

    def __init__(self, *schemes: str) -> None:
        self.codes = {}
        for name in schemes:
            scheme = parse_scheme(name)
            given = 0.1 if scheme.static else None
            self.codes[name] = quantize(torch.randn(32, 128), scheme, given)

    def files(self) -> list[Path]:
        return []

    def names(self) -> list[str]:
        return [*self.codes, "plain"]

    def shape(self, name: str) -> tuple[int, ...]:
        return (32, 128)

    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def scheme(self, name: str) -> Scheme | None:
        return None if name == "plain" else self.codes[name].scheme

    def read(self, name: str) -> Tensor | Codes:
        return torch.ones(32, 128) if name == "plain" else self.codes[name]


@pytest.mark.parametrize(
    ("own", "a8", "a16"),
    [
        ("w4a16-g32", "w4a8-g32-blocks", "w4a16-g32"),
        ("w8a16-g128", "w8a8-g128-blocks", "w8a16-g128"),
        ("w4a8-g32-blocks", "w4a8-g32-blocks", "w4a16-g32"),
        ("w4a16-g32-asym", "w4a8-g32-asym", "w4a16-g32-asym"),
        ("w8a16", "w8a8", "w8a16"),
        ("w8a8", "w8a8", "w8a16"),
    ],
)
def test_only_activations_change(own: str, a8: str, a16: str) -> None:
    base = Held(own, "nf4")
    for quantization, name in (("a8", a8), ("a16", a16)):
        source = Activated(base, quantization)
        scheme = source.scheme(own)
        assert scheme is not None and scheme.name == name
        assert source.scheme("plain") is None
        levels = source.scheme("nf4")
        assert levels is not None and levels.name == "nf4-g64"  # meets bfloat16 only
        codes = source.read(own)
        assert isinstance(codes, Codes)
        packed = format_of(scheme).pack_codes(codes)
        assert torch.equal(format_of(scheme).unpack(packed, 32, 128), base.codes[own].dequantize())


@pytest.mark.parametrize(
    ("schemes", "why"),
    [
        ((), "it isn't quantized.*choose w8a8 or w4a8"),
        (("nf4", "fp8"), "its matrices are fp8, nf4-g64: only integers and K-quants"),
        (("w8a8-static", "w4a16"), r"its activations is calibrated \(w8a8-static\)"),
    ],
)
@pytest.mark.parametrize("quantization", ["a8", "a16"])
def test_what_cant_take_effect_is_refused(
    quantization: str, schemes: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Activated(Held(*schemes), quantization)


def test_widened_codes_are_values() -> None:
    source = Widened(Held("w4a16"))
    assert source.scheme("w4a16") is None
    values = source.read("w4a16")
    assert isinstance(values, Tensor) and values.shape == (32, 128)


def test_an_unquantized_model_says_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"can't take effect on .*stories-draft, as it isn't"):
        load_model(resolve("stories-draft"), quantization="a8")

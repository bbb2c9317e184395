"""Scales folded into what comes before: the same function, bit for bit with powers of two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.models.sources import open_source
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.fold import fold, foldable, tie
from penstock.pipeline.parts import Parts
from penstock.pipeline.stream import Stream
from tests.models.tiny import Tiny

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "qwen2"]
FAMILIES += ["granite", "cohere", "glm4", "starcoder2", "phi", "stablelm", "gemma4"]


def outputs(parts: Parts, text: CalibrationSet, scale: float | None) -> list[torch.Tensor]:
    """The stream behind each layer, columns scaled by up to 2^±3 (None: by nothing)."""
    spec, found = parts.spec.decoder, []
    stream = Stream(spec, text, {"embed.weight": parts.read(parts.embedding())})
    random = torch.Generator().manual_seed(0)
    for i, layer in enumerate(spec.layers):
        tensors = parts.layer(i)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for module in foldable(layer) if scale is not None else ():
            k = tensors[f"{module}.weight"].shape[1]
            exponent = torch.randint(-3, 4, (k,), generator=random).float()
            scales = torch.exp2(exponent * (scale or 1.0))
            make_equal = tie(layer, module)
            if make_equal is not None:
                scales = make_equal(scales)
                if scale == 1.0:
                    scales = torch.exp2(scales.log2().round())
            changed = fold(tensors, spec, layer, module, scales)
            assert f"{module}.weight" in changed
            assert not torch.equal(tensors[f"{module}.weight"], before[f"{module}.weight"])
        stream.advance(tensors)
        found.append(torch.cat(stream.residuals()).clone())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays(
    family: str, tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    parts = Parts.of(open_source(tiny(family).folder))
    want = outputs(parts, calibration, None)
    for got, expected in zip(outputs(parts, calibration, 0.77), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "qwen3", "olmo2", "granite", "cohere", "stablelm"]
)
def test_powers_of_two_change_no_bit(
    family: str, tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    """(A Gemma's norm is stored less 1, which takes bits of its own.)"""
    parts = Parts.of(open_source(tiny(family).folder))
    want = outputs(parts, calibration, None)
    for got, expected in zip(outputs(parts, calibration, 1.0), want, strict=True):
        assert torch.equal(got, expected)

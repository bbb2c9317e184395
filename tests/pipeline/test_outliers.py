"""SmoothQuant on a model with outliers that were planted without changing its function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.models.registry import read_spec
from penstock.models.sources import open_source
from penstock.models.weights import load_weights, stored_formats
from penstock.nn import Decoder
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts
from penstock.pipeline.quantize import quantize_model
from penstock.quant import Codes, parse_scheme
from tests.models.tiny import Sequence, Tiny

FACTOR = 128.0


def planted(parts: Parts) -> dict[str, Tensor | Codes]:
    """Three channels of each norm FACTOR times as large, the columns behind them as much smaller.

    In bfloat16, as the reference: a power of two changes no digit.
    """
    found: dict[str, Tensor | Codes] = {}
    for i in range(parts.num_layers):
        for norm, module in (("attention_norm", "attention.qkv"), ("mlp_norm", "mlp.up")):
            (name,) = parts.names[f"layers.{i}.{norm}.weight"]
            scale = torch.ones(parts.source.shape(name))
            scale[[3, 17, 40]] = FACTOR
            found[name] = parts.read(name) * scale
            for part in parts.names[f"layers.{i}.{module}.weight"]:
                found[part] = parts.read(part) / scale
    return found


def logits_of(source: Overlay, tokens: Tensor) -> Tensor:
    spec = read_spec(source.path)
    formats = stored_formats(spec, source, torch.bfloat16)
    decoder = Decoder(spec.decoder, formats, torch.bfloat16, 160)
    load_weights(decoder, spec, source)
    return Sequence(decoder).feed(tokens)


def test_outliers_no_longer_drown_the_rest(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    checkpoint = tiny("llama3-rope")
    plain = open_source(checkpoint.folder)
    tensors = planted(Parts.of(plain))
    base = Overlay(plain, tensors.items())
    want = logits_of(Overlay(plain, ()), checkpoint.prompt)
    assert torch.equal(logits_of(base, checkpoint.prompt), want)  # the function is the same

    def drift(method: str) -> float:
        config = QuantizeConfig(parse_scheme("w8a8"), method)
        source = Overlay(plain, tensors | dict(quantize_model(base, config, calibration)))
        p, q = (x.log_softmax(-1) for x in (want, logits_of(source, checkpoint.prompt)))
        return float((p.exp() * (p - q)).sum(-1).mean())

    assert drift("smoothquant") < 0.2 * drift("rtn")

"""What a layer's matrices are given, against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.models.sources import open_source
from penstock.pipeline import stream as module
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.parts import Parts
from penstock.pipeline.stream import Stream
from tests.models.tiny import Tiny

INPUTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def inputs_of(model: Any, calibration: CalibrationSet) -> dict[str, Tensor]:
    """Inputs [T, K] of every linear module on all windows, and what each layer returns."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):

            def keep(_: Any, args: Any, name: str = name) -> None:
                found.setdefault(name, []).append(args[0][0].clone())

            hooks.append(linear.register_forward_pre_hook(keep))
    with torch.inference_mode():
        for window in calibration.windows:
            model(torch.tensor(window)[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "granite", "cohere2", "glm4", "gemma4"]
)
def test_statistics_are_those_of_the_models_own_inputs(
    family: str,
    tiny: Callable[[str], Tiny],
    calibration: CalibrationSet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 200)  # three batches
    checkpoint = tiny(family)
    want = inputs_of(checkpoint.oracle, calibration)
    parts = Parts.of(open_source(checkpoint.folder))
    stream = Stream(
        parts.spec.decoder, calibration, {"embed.weight": parts.read(parts.embedding())}
    )
    for i in range(parts.num_layers):
        before = [residual.clone() for residual in stream.residuals()]
        found = stream.observe(parts.layer(i))
        assert all(torch.equal(a, b) for a, b in zip(before, stream.residuals(), strict=True))
        for name, seen in found.items():
            theirs = next(t for t in INPUTS[name] if f"model.layers.{i}.{t}" in want)
            x = want[f"model.layers.{i}.{theirs}"]
            assert seen.rows == len(x) == calibration.num_tokens
            torch.testing.assert_close(seen.max_abs, x.abs().amax(0), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(
                seen.hessian, x.t() @ x / len(x), rtol=1e-3, atol=1e-3 * float(x.pow(2).mean())
            )
        stream.advance(parts.layer(i))
    assert stream.at == parts.num_layers

"""CWM: Llama of whose layers three of four slide. Source: FAIR 2025, arXiv:2510.02387."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec

_ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""What transformers takes where a config says nothing of it."""


@register("CwmForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a CWM."""
    c.assume(
        num_key_value_heads=8, max_position_embeddings=131_072, head_dim=128,
        eos_token_id=[128_001, 128_008, 128_009],
    )  # fmt: skip
    c.only("attention_bias", (False,), False)
    if not c.has("rope_scaling") and not c.has("rope_parameters"):
        c.replace(rope_parameters=_ROPE)
    dim = head_dim(c)
    base, mlp = attention(c, rope(c, dim, theta=1e6), dim), gated_mlp(c)
    window = sliding_window(c, 8192)
    c.only("window_pattern", (4, None), None)  # what layer_types says, too
    windows = layer_windows(
        c, c.integer("num_hidden_layers"), window, lambda i: window > 0 and i % 4 > 0
    )
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "cwm", decoder(c, layers, eps=1e-5), DENSE_RULES)

"""gpt-oss: experts with biases and clamped gates, sinks, a window in every other layer.

Source: OpenAI 2025, arXiv:2508.10925.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    SINK_RULES,
    attention,
    decoder,
    expert_rules,
    experts,
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

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where a config says nothing of it."""

_RULES = (
    *SINK_RULES,
    *expert_rules("mlp", "gate_proj", "up_proj", "down_proj", router="router"),
    *DENSE_RULES,
)
"""Each expert by itself, as `models.experts` gives them; in files they lie together."""


@register("GptOssForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a gpt-oss; what trains its router is left."""
    c.assume(num_key_value_heads=8, max_position_embeddings=131_072)
    if not c.has("rope_scaling") and not c.has("rope_parameters"):
        c.replace(rope_parameters=_YARN)
    for key in ("router_aux_loss_coef", "experts_per_token", "initial_context_length"):
        c.get(key)  # the last two are said a second time, by other names
    c.only("swiglu_limit", (7.0,), 7.0)
    c.only("swiglu_alpha", (1.702,), 1.702)
    dim, count = head_dim(c, 64), c.integer("num_hidden_layers")
    bias = c.flag("attention_bias", True)
    base = replace(attention(c, rope(c, dim, theta=150_000.0), dim, bias=bias), sinks=True)
    window = sliding_window(c, 128)
    windows = layer_windows(c, count, window, lambda i: window > 0 and i % 2 == 0)
    mlp = experts(c, 128, 4, "intermediate_size", normalize=True)
    assert mlp.experts is not None
    own = replace(mlp.experts, router_bias=True)
    mlp = replace(mlp, activation="swiglu_oai", bias=True, experts=own)
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "gpt_oss", decoder(c, layers, eps=1e-5), _RULES)

"""Qwen 3, dense: a norm on each head of q and k, no biases. Source: arXiv:2505.09388."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
    upper_layer_windows,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Qwen3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Qwen 3."""
    c.assume(num_key_value_heads=32, max_position_embeddings=32_768)
    dim = head_dim(c, 128)
    base = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    base, mlp = replace(base, qk_norm="head"), gated_mlp(c)
    windows = upper_layer_windows(c, c.integer("num_hidden_layers"))
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "qwen3", decoder(c, layers), (*QK_NORM_RULES, *DENSE_RULES))

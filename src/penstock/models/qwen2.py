"""Qwen 2 and 2.5: Llama with biases on q, k and v. Source: Yang et al., arXiv:2407.10671."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
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


@register("Qwen2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen 2 or 2.5."""
    c.assume(num_key_value_heads=32, max_position_embeddings=32_768)
    dim = head_dim(c)
    base, mlp = replace(attention(c, rope(c, dim), dim), qkv_bias=True), gated_mlp(c)
    windows = upper_layer_windows(c, c.integer("num_hidden_layers"))
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "qwen2", decoder(c, layers), DENSE_RULES)

"""Mistral and Ministral: Llama with an optional sliding window. Source: arXiv:2310.06825."""

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


@register("MistralForCausalLM", "MinistralForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Mistral or Ministral; every layer slides where `sliding_window` isn't null
    and `layer_types` says nothing else.
    """
    c.assume(num_key_value_heads=8, max_position_embeddings=131_072)
    dim = head_dim(c)
    base, mlp = attention(c, rope(c, dim), dim), gated_mlp(c)
    window = sliding_window(c, 4096)
    windows = layer_windows(c, c.integer("num_hidden_layers"), window, lambda _: window > 0)
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "mistral", decoder(c, layers), DENSE_RULES)

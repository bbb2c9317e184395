"""Helium: Llama whose neighbouring dimensions turn as pairs. Source: Kyutai 2025, its card."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("HeliumForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Helium."""
    c.assume(num_key_value_heads=20, max_position_embeddings=4096, head_dim=128)
    dim = head_dim(c)
    rotation = replace(rope(c, dim, theta=100_000.0), interleaved=True)
    heads = attention(c, rotation, dim, bias=c.flag("attention_bias", False))
    layer = LayerSpec(replace(heads, out_bias=False), gated_mlp(c))
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), eps=1e-8)
    return model_spec(c, "helium", spec, DENSE_RULES)

"""ERNIE 4.5, dense: Llama whose neighbouring dimensions turn as pairs.

Source: Baidu 2025, ERNIE 4.5 Technical Report.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an ERNIE 4.5 without experts, under its present or its first name."""
    c.assume(num_key_value_heads=2, max_position_embeddings=131_072, head_dim=128)
    dim, bias = head_dim(c), c.flag("use_bias", False)
    rotation = replace(rope(c, dim, theta=500_000.0), interleaved=True)
    mlp = replace(gated_mlp(c), bias=bias)
    layers = (LayerSpec(attention(c, rotation, dim, bias=bias), mlp),)
    spec = decoder(c, layers * c.integer("num_hidden_layers"), tied=True, eps=1e-5)
    return model_spec(c, "ernie4_5", spec, DENSE_RULES)

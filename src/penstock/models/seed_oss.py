"""Seed-OSS: Llama with biases on q, k and v. Source: ByteDance Seed 2025, its model card."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("SeedOssForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Seed-OSS."""
    c.assume(num_key_value_heads=8, max_position_embeddings=524_288, head_dim=128)
    dim = head_dim(c)
    heads = replace(
        attention(c, rope(c, dim), dim),
        qkv_bias=c.flag("attention_bias", True),
        out_bias=c.flag("attention_out_bias", False),
    )
    layers = (LayerSpec(heads, gated_mlp(c)),) * c.integer("num_hidden_layers")
    return model_spec(c, "seed_oss", decoder(c, layers), DENSE_RULES)

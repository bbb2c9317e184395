"""OLMo 2: norms after each block instead of before, and over all heads of q and of k.

Source: OLMo Team 2024, arXiv:2501.00656.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Olmo2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMo 2."""
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    heads = replace(heads, qk_norm="full")
    layer = LayerSpec(heads, gated_mlp(c), pre_norm=False, post_norm=True)
    layers = (layer,) * c.integer("num_hidden_layers")
    rules = (*QK_NORM_RULES, *SANDWICH_RULES, *DENSE_RULES)
    return model_spec(c, "olmo2", decoder(c, layers, eps=1e-5), rules)

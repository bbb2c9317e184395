"""Gemma 1: Llama with scaled embeddings and norms around 1. Source: arXiv:2403.08295."""

from __future__ import annotations

import math

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("GemmaForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 1."""
    c.assume(num_key_value_heads=16, max_position_embeddings=8192)
    if c.get("hidden_act") == "gelu":  # the first files call the tanh approximation so
        c.replace(hidden_act="gelu_pytorch_tanh")
    c.only("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    c.only("mlp_bias", (False,), False)
    dim = head_dim(c, 256)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    mlp = gated_mlp(c, default="gelu_pytorch_tanh")
    spec = decoder(
        c,
        (LayerSpec(heads, mlp),) * c.integer("num_hidden_layers"),
        tied=True,
        offset=1.0,
        embed_scale=math.sqrt(c.integer("hidden_size")),
    )
    return model_spec(c, "gemma", spec, DENSE_RULES)

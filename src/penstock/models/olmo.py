"""OLMo 1: Llama with layer norms that have no weights. Source: arXiv:2402.00838."""

from __future__ import annotations

from penstock.models.common import (
    DENSE_RULES,
    PLAIN_NORM_RULES,
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
from penstock.nn.spec import LayerSpec, NormSpec


@register("OlmoForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMo 1 that clips no queries, keys and values (`clip_qkv`)."""
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    c.only("mlp_bias", (False,), False)
    layers = (LayerSpec(heads, gated_mlp(c)),) * c.integer("num_hidden_layers")
    spec = decoder(c, layers, norm=NormSpec("layer", eps=1e-5))
    return model_spec(c, "olmo", spec, (*PLAIN_NORM_RULES, *DENSE_RULES))

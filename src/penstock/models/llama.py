"""Llama 2, 3, 3.1, 3.2, and what is shaped like them. Source: Touvron et al., arXiv:2302.13971."""

from __future__ import annotations

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("LlamaForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Llama."""
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    layers = (LayerSpec(heads, gated_mlp(c)),) * c.integer("num_hidden_layers")
    return model_spec(c, "llama", decoder(c, layers), DENSE_RULES)

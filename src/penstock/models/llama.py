"""Llama 2, 3, 3.1, 3.2, and what is shaped like them. Source: Touvron et al., arXiv:2302.13971."""

from __future__ import annotations

from penstock.models.common import DENSE_RULES, activation, head_dim, model_spec, rope
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.spec import ModelSpec
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


@register("LlamaForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Llama."""
    dim = head_dim(c)
    bias = c.only("attention_bias", (False, True), False)
    attention = AttentionSpec(
        num_heads=c.integer("num_attention_heads"),
        num_kv_heads=c.integer("num_key_value_heads", c.integer("num_attention_heads")),
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope(c, dim),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation=activation(c, "hidden_act", "silu"),
        bias=c.only("mlp_bias", (False, True), False),
    )
    decoder = DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=c.integer("hidden_size"),
        layers=(LayerSpec(attention, mlp),) * c.integer("num_hidden_layers"),
        norm=NormSpec(eps=c.number("rms_norm_eps", 1e-6)),
        max_position=c.integer("max_position_embeddings", 2048),
        tied=c.only("tie_word_embeddings", (False, True), False),
    )
    return model_spec(c, "llama", decoder, DENSE_RULES)

"""Qwen 3 with experts: some layers, or all, have many instead of one. Source: arXiv:2505.09388."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    mixing_layers,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Qwen3MoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen 3 with experts; what trains its router is left."""
    c.assume(
        num_key_value_heads=4, max_position_embeddings=32_768,
        moe_intermediate_size=768, intermediate_size=6144,
    )  # fmt: skip
    c.get("router_aux_loss_coef")
    dim = head_dim(c)
    base = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    base = replace(base, qk_norm="head")
    normalize = c.flag("norm_topk_prob", False)
    mixed = experts(c, 128, 8, "moe_intermediate_size", normalize=normalize)
    count, dense = c.integer("num_hidden_layers"), gated_mlp(c)
    window = sliding_window(c, 4096)
    window = window if c.flag("use_sliding_window", False) else 0
    c.get("max_window_layers")  # of dense Qwens: here all layers slide, as in transformers
    base = replace(base, window=window)
    layers = [LayerSpec(base, mixed if mixes else dense) for mixes in mixing_layers(c, count)]
    rules = (*QK_NORM_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "qwen3_moe", decoder(c, layers), rules)

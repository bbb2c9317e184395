"""Mixtral: Mistral with eight experts, of which each token takes two. Source: arXiv:2401.04088."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    attention,
    decoder,
    expert_rules,
    experts,
    head_dim,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec

_RULES = (
    *expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    *EXPERT_RULES,  # as transformers has them in memory
    *DENSE_RULES,
)


@register("MixtralForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Mixtral; what trains its router (`router_jitter_noise`, …) is left."""
    c.assume(num_key_value_heads=8, max_position_embeddings=131_072)
    for key in ("router_aux_loss_coef", "router_jitter_noise"):
        c.get(key)
    dim = head_dim(c)
    base = attention(c, rope(c, dim, theta=1e6), dim)
    base = replace(base, window=sliding_window(c, None))
    mlp = experts(c, 8, 2, "intermediate_size", normalize=True)
    layers = [LayerSpec(base, mlp)] * c.integer("num_hidden_layers")
    return model_spec(c, "mixtral", decoder(c, layers, eps=1e-5), _RULES)

"""OLMoE: 64 small experts, of which each token takes eight; norms over all heads of q and k.

FlexOlmo has norms after each block instead of before. Source: Muennighoff et al. 2024,
arXiv:2409.02060; FlexOlmo: Shi et al. 2025, arXiv:2507.07024.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
    attention,
    decoder,
    experts,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("OlmoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMoE."""
    layers = [_layer(c, 64, 8, 10_000.0)] * c.integer("num_hidden_layers")
    rules = (*QK_NORM_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "olmoe", decoder(c, layers, eps=1e-5), rules)


@register("FlexOlmoForCausalLM")
def read_flexible_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a FlexOlmo."""
    layer = replace(_layer(c, 7, 5, 500_000.0), pre_norm=False, post_norm=True)
    layers = [layer] * c.integer("num_hidden_layers")
    rules = (*QK_NORM_RULES, *SANDWICH_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "flex_olmo", decoder(c, layers), rules)


def _layer(c: ConfigReader, count: int, per_token: int, theta: float) -> LayerSpec:
    """Arguments are the family's defaults; what trains its router is left."""
    c.assume(max_position_embeddings=4096)
    c.get("router_aux_loss_coef")
    dim = head_dim(c)
    heads = attention(c, rope(c, dim, theta=theta), dim, bias=c.flag("attention_bias", False))
    normalize = c.flag("norm_topk_prob", False)
    mlp = experts(c, count, per_token, "intermediate_size", normalize=normalize)
    return LayerSpec(replace(heads, qk_norm="full"), mlp)

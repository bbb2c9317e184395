"""OLMoE: 64 small experts, of which each token takes eight; norms over all heads of q and k.

Source: Muennighoff et al. 2024, arXiv:2409.02060.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
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
    """`config.json` of an OLMoE; what trains its router is left."""
    c.assume(max_position_embeddings=4096)
    c.get("router_aux_loss_coef")
    dim = head_dim(c)
    base = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    base = replace(base, qk_norm="full")
    normalize = c.flag("norm_topk_prob", False)
    mlp = experts(c, 64, 8, "intermediate_size", normalize=normalize)
    layers = [LayerSpec(base, mlp)] * c.integer("num_hidden_layers")
    rules = (*QK_NORM_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "olmoe", decoder(c, layers, eps=1e-5), rules)

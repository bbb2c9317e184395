"""GLM-4.5 and 4.6, GLM-4.7-Flash (`Lite`, with latents), and Solar Open: experts by sigmoids.

Source: arXiv:2508.06471; Solar Open: transformers' `solar_open`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    SHARED_RULES,
    attention,
    decoder,
    dense_first,
    gated_mlp,
    head_dim,
    mixed_blocks,
    model_spec,
    predicting_layers,
    routed_experts,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.latents import LATENT_RULES, latent_attention
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Glm4MoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GLM with experts; the first layers have none, what guesses is left."""
    c.assume(
        num_key_value_heads=8, max_position_embeddings=131_072, moe_intermediate_size=1408,
        n_shared_experts=1, topk_group=1,
    )  # fmt: skip
    dim = head_dim(c)
    base = attention(c, rope(c, dim, partial=0.5), dim, bias=c.flag("attention_bias", False))
    base = replace(base, out_bias=False)
    if c.flag("use_qk_norm", False):
        base = replace(base, qk_norm="head")
    mixed = routed_experts(c, 128, 8, normalize=True, scale=1.0, groups=1)
    dense = gated_mlp(c)
    blocks = dense_first(c, dense, mixed, 1)
    layers = [LayerSpec(base, block) for block in blocks]
    rules = (
        *predicting_layers(c, 1), *QK_NORM_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES,
    )  # fmt: skip
    return model_spec(c, "glm4_moe", decoder(c, layers, eps=1e-5), rules)


@register("Glm4MoeLiteForCausalLM")
def read_lite_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GLM with experts and latents: GLM-4.7-Flash."""
    c.assume(
        max_position_embeddings=202_752, moe_intermediate_size=1536, n_shared_experts=1,
        topk_group=1, kv_lora_rank=512, qk_nope_head_dim=192, v_head_dim=256,
    )  # fmt: skip
    attends = latent_attention(c, query_rank=768)
    mixed = routed_experts(c, 64, 4, normalize=True, scale=1.8, groups=1)
    dense = gated_mlp(c)
    layers = [LayerSpec(attends, block) for block in mixed_blocks(c, dense, mixed, 1)]
    rules = (
        *predicting_layers(c, 1), *LATENT_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES,
    )  # fmt: skip
    return model_spec(c, "glm4_moe_lite", decoder(c, layers, eps=1e-5), rules)


@register("SolarOpenForCausalLM")
def read_solar_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Solar Open: all layers have experts, and heads turn whole."""
    c.assume(
        num_key_value_heads=8, max_position_embeddings=131_072, moe_intermediate_size=1280,
        n_shared_experts=1, topk_group=1, head_dim=128,
    )  # fmt: skip
    c.only("use_qk_norm", (False,), False)
    c.only("first_k_dense_replace", (0,), 0)
    c.get("intermediate_size")  # of layers without experts
    dim = head_dim(c)
    heads = attention(
        c, rope(c, dim, theta=1e6, partial=1.0), dim, bias=c.flag("attention_bias", False)
    )
    mixed = routed_experts(c, 128, 8, normalize=True, scale=1.0, groups=1)
    layers = (LayerSpec(replace(heads, out_bias=False), mixed),) * c.integer("num_hidden_layers")
    rules = (*SHARED_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "solar_open", decoder(c, layers, eps=1e-5), rules)

"""GLM-4.5 and 4.6, and GLM-4.7-Flash (`Lite`, with latents): experts by sigmoids.

Source: arXiv:2508.06471.
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
    layer_kinds,
    model_spec,
    predicting_layers,
    routed_experts,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.latents import LATENT_RULES, latent_attention
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec, MlpSpec


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
    layers = [LayerSpec(attends, block) for block in _blocks(c, dense, mixed)]
    rules = (
        *predicting_layers(c, 1), *LATENT_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES,
    )  # fmt: skip
    return model_spec(c, "glm4_moe_lite", decoder(c, layers, eps=1e-5), rules)


def _blocks(c: ConfigReader, dense: MlpSpec, mixed: MlpSpec) -> list[MlpSpec]:
    """Each layer's: as `mlp_layer_types` says, or all but the first ones with experts."""
    blocks, types = dense_first(c, dense, mixed, 1), c.get("mlp_layer_types")
    if types is None:
        return blocks
    kinds = {"dense": dense, "sparse": mixed}
    return layer_kinds("mlp_layer_types", types, kinds, len(blocks))

"""DeepSeek-V3 and R1, and Kimi-K2: latents, and experts by sigmoids in groups.

Source: arXiv:2412.19437; Kimi-K2: arXiv:2507.20534.
"""

from __future__ import annotations

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    SHARED_RULES,
    decoder,
    dense_first,
    gated_mlp,
    model_spec,
    predicting_layers,
    routed_experts,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.latents import LATENT_RULES, latent_attention
from penstock.models.registry import register
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("DeepseekV3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a DeepSeek-V3; the first layers have no experts, what guesses is left."""
    c.assume(
        moe_intermediate_size=2048, max_position_embeddings=4096, n_shared_experts=1, topk_group=4
    )
    attends = latent_attention(c, query_rank=1536)
    mixed = routed_experts(c, 256, 8, normalize=True, scale=2.5, groups=8)
    dense = gated_mlp(c)
    blocks = dense_first(c, dense, mixed, 3)
    layers = [LayerSpec(attends, block) for block in blocks]
    rules = (
        *predicting_layers(c, 1), *LATENT_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES,
    )  # fmt: skip
    return model_spec(c, "deepseek_v3", decoder(c, layers), rules)

"""DeepSeek-V2 and its Lite: latents, and experts by a softmax. Source: arXiv:2405.04434."""

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
    softmax_experts,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.latents import LATENT_RULES, latent_attention
from penstock.models.registry import register
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("DeepseekV2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a DeepSeek-V2; the first layers have no experts."""
    c.assume(moe_intermediate_size=1407, max_position_embeddings=2048)
    attends = latent_attention(c, query_rank=1536)
    mixed, dense = softmax_experts(c, 64), gated_mlp(c)
    blocks = dense_first(c, dense, mixed, 0)
    layers = [LayerSpec(attends, block) for block in blocks]
    more = predicting_layers(c, 0)  # of GGUF files, which say that there are none
    rules = (*more, *LATENT_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "deepseek_v2", decoder(c, layers), rules)

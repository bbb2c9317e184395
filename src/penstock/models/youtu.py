"""Youtu-LLM: dense, with DeepSeek-V3's attention over latents. Source: Tencent 2025, its card."""

from __future__ import annotations

from penstock.models.common import DENSE_RULES, decoder, gated_mlp, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.latents import LATENT_RULES, latent_attention
from penstock.models.registry import register
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("YoutuForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Youtu-LLM."""
    c.assume(max_position_embeddings=131_072)
    c.only("mlp_bias", (False,), False)
    c.get("embedding_initializer_range")  # of how weights were drawn before training
    layer = LayerSpec(latent_attention(c, query_rank=1536), gated_mlp(c))
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), tied=True)
    return model_spec(c, "youtu", spec, (*LATENT_RULES, *DENSE_RULES))

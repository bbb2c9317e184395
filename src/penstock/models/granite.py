"""Granite 3: Llama with four multipliers. Source: Granite Team 2024, Granite 3.0 Language Models.

A block's result times r is added to the residual stream. Here the stream is kept divided by r, so
that nothing is multiplied: a root-mean-square norm gives the same of x / r where its epsilon is
divided by r². So the embedding's multiplier is, and matrices and adapters are those of the file.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec


def granite_heads(c: ConfigReader, *, turns: bool = True) -> AttentionSpec:
    """Attention with its multiplier; turns: heads are rotated."""
    dim = head_dim(c)
    turning = rope(c, dim)
    return attention(
        c,
        turning if turns else None,
        dim,
        scale=c.positive("attention_multiplier", 1.0),
        bias=c.flag("attention_bias", False),
    )


def with_multipliers(c: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """`spec` with those of the embedding, of what blocks give, and of logits."""
    times = c.positive("residual_multiplier", 1.0)
    return replace(
        spec,
        embed_scale=c.positive("embedding_multiplier", 1.0) / times,
        embed_scale_rounds=False,
        norm=replace(spec.norm, eps=spec.norm.eps / times**2),
        logit_scale=1.0 / c.positive("logits_scaling", 1.0),
    )


@register("GraniteForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Granite 3."""
    layers = (LayerSpec(granite_heads(c), gated_mlp(c)),) * c.integer("num_hidden_layers")
    return model_spec(c, "granite", with_multipliers(c, decoder(c, layers)), DENSE_RULES)

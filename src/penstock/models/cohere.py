"""Command-R (Cohere) and Command-R7B, Command-A (Cohere 2): both blocks read one norm's rows.

Neighbouring dimensions turn as pairs, and logits are scaled. Of Cohere 2's layers three of four
slide, and those that don't have no rotation. Source: Cohere 2025, arXiv:2504.00698.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rule
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec, NormSpec


@register("CohereForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Command-R without norms of queries and keys, which Command-R+ has."""
    base = cohere_heads(c, 500_000.0)
    return _model(c, "cohere", (base,) * c.integer("num_hidden_layers"))


@register("Cohere2ForCausalLM")
def read_second_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Command-R7B or Command-A."""
    for key, built in (
        ("use_gated_activation", True),
        ("use_parallel_block", True),
        ("use_embedding_sharing", True),
        ("use_parallel_embedding", False),
        ("rotary_pct", 1.0),
        ("position_embedding_type", "rope_gptj"),
        ("order_of_interleaved_layers", "local_attn_first"),
    ):
        c.only(key, (built,), built)
    base = cohere_heads(c, 10_000.0)
    every = c.integer("sliding_window_pattern", 4)
    c.only("layer_switch", (every,), every)
    windows = layer_windows(
        c, c.integer("num_hidden_layers"), sliding_window(c, 4096), lambda i: (i + 1) % every > 0
    )
    return _model(
        c, "cohere2", [replace(base, window=w, rope=base.rope if w else None) for w in windows]
    )


def cohere_heads(c: ConfigReader, theta: float) -> AttentionSpec:
    """Attention without norms of queries and keys; theta: the family's default base."""
    c.assume(max_position_embeddings=8192)
    c.only("use_qk_norm", (False,), False)
    dim = head_dim(c)
    rotation = replace(rope(c, dim, theta=theta), interleaved=True)
    return attention(c, rotation, dim, bias=c.flag("attention_bias", False))


def _model(c: ConfigReader, family: str, attentions: Iterable[AttentionSpec]) -> ModelSpec:
    mlp = gated_mlp(c)
    spec = decoder(
        c,
        [LayerSpec(a, mlp, parallel=True, one_norm=True) for a in attentions],
        tied=True,
        norm=NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5)),
    )
    return cohere_model(c, family, spec)


def cohere_model(c: ConfigReader, family: str, spec: DecoderSpec, *rules: Rule) -> ModelSpec:
    """What they have in common: logits are scaled, and texts may be longer than the config says."""
    c.only("mlp_bias", (False,), False)
    longest = c.integer("model_max_length", spec.max_position)  # nothing is scaled beyond the other
    spec = replace(
        spec,
        max_position=max(longest, spec.max_position),
        logit_scale=c.positive("logit_scale", 0.0625),
    )
    return model_spec(c, family, spec, (*rules, *DENSE_RULES))

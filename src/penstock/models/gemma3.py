"""Gemma 3, text: five local layers to a global one, each kind with a rope of its own.

Source: Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
    softcap,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import layer_ropes
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Gemma3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 3 without its vision tower."""
    c.assume(num_key_value_heads=4, max_position_embeddings=131_072)
    dim = head_dim(c, 256)
    local_rope, global_rope = layer_ropes(
        c,
        dim,
        local_theta=c.number("rope_local_base_freq", 10_000.0),
        global_theta=c.number("rope_theta", 1_000_000.0),
    )
    base = attention(
        c,
        global_rope,
        dim,
        scale=c.positive("query_pre_attn_scalar", 256) ** -0.5,
        bias=c.flag("attention_bias", False),
    )
    base = replace(base, qk_norm="head")
    cap = softcap(c, "attn_logit_softcapping", None)
    if cap:
        warnings.warn(
            f"config.json gives Gemma 3 attn_logit_softcapping={cap}, which isn't applied, as in "
            "transformers. Set it to null to leave this warning out.",
            UserWarning,
            stacklevel=3,
        )
    mlp = gated_mlp(c, "hidden_activation", "gelu_pytorch_tanh")
    every = c.integer("sliding_window_pattern", 6)
    c.get("_sliding_window_pattern")  # written by transformers, which doesn't read it again
    windows = layer_windows(
        c, c.integer("num_hidden_layers"), sliding_window(c, 4096), lambda i: (i + 1) % every > 0
    )
    attentions = [replace(base, window=w, rope=local_rope if w else global_rope) for w in windows]
    spec = decoder(
        c,
        [LayerSpec(a, mlp, post_norm=True) for a in attentions],
        tied=True,
        offset=1.0,
        embed_scale=math.sqrt(c.integer("hidden_size")),
        final_softcap=softcap(c, "final_logit_softcapping", None),
    )
    return model_spec(c, "gemma3", spec, (*QK_NORM_RULES, *SANDWICH_RULES, *DENSE_RULES))

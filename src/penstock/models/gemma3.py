"""Gemma 3, text: five local layers to a global one, each kind with a rope of its own.

Source: Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from penstock.errors import UnsupportedModelError
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
from penstock.models.rope import rope_spec
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec, RopeSpec


@register("Gemma3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 3 without its vision tower."""
    c.assume(num_key_value_heads=4, max_position_embeddings=131_072)
    dim = head_dim(c, 256)
    local_rope, global_rope = _ropes(c, dim)
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


def _ropes(c: ConfigReader, dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of local and of global layers."""
    scaling, both = c.nested("rope_scaling"), c.nested("rope_parameters")
    if scaling and both:
        raise UnsupportedModelError("config.json has rope_scaling and rope_parameters: remove one.")
    local = both.nested("sliding_attention") if both else None
    everywhere = both.nested("full_attention") if both else scaling
    if both and both.unread():
        raise UnsupportedModelError(
            f"rope_parameters has keys that nothing reads: {', '.join(both.unread())}. "
            "Gemma 3 keeps one object for full_attention and one for sliding_attention there."
        )
    return (
        rope_spec(c, local, dim, theta=c.number("rope_local_base_freq", 10_000.0)),
        rope_spec(c, everywhere, dim, theta=c.number("rope_theta", 1_000_000.0)),
    )

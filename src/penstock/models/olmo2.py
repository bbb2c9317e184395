"""OLMo 2 and 3: norms after each block instead of before, and over all heads of q and of k.

In OLMo 3 three of four layers slide, and a scaled rope is for the others alone.
Source: OLMo Team 2024, arXiv:2501.00656, and 2025, arXiv:2512.13961.
"""

from __future__ import annotations

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
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import layer_ropes, rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec

_RULES = (*QK_NORM_RULES, *SANDWICH_RULES, *DENSE_RULES)


@register("Olmo2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMo 2."""
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    heads = replace(heads, qk_norm="full")
    layer = LayerSpec(heads, gated_mlp(c), pre_norm=False, post_norm=True)
    layers = (layer,) * c.integer("num_hidden_layers")
    return model_spec(c, "olmo2", decoder(c, layers, eps=1e-5), _RULES)


@register("Olmo3ForCausalLM")
def read_third_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMo 3."""
    dim, theta = head_dim(c), c.number("rope_theta", 500_000.0)
    local_rope, global_rope = layer_ropes(c, dim, local_theta=theta, global_theta=theta)
    base = attention(c, global_rope, dim, bias=c.flag("attention_bias", False))
    base, mlp = replace(base, qk_norm="full"), gated_mlp(c)
    windows = layer_windows(
        c, c.integer("num_hidden_layers"), sliding_window(c, 4096), lambda i: (i + 1) % 4 > 0
    )
    layers = [
        LayerSpec(
            replace(base, window=w, rope=local_rope if w else global_rope),
            mlp,
            pre_norm=False,
            post_norm=True,
        )
        for w in windows
    ]
    return model_spec(c, "olmo3", decoder(c, layers, eps=1e-5), _RULES)

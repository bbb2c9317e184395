"""GLM-4, dense: half of each head turns, in neighbouring pairs; GLM-4-0414 norms blocks after them.

Source: GLM Team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    FUSED_MLP_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec

_POST_NORMS: tuple[Rule, ...] = tuple(
    Rename(f"model.layers.{{i}}.{theirs}.weight", f"layers.{{i}}.{ours}.weight")
    for theirs, ours in (
        ("post_self_attn_layernorm", "attention_post_norm"),
        ("post_mlp_layernorm", "mlp_post_norm"),
    )
)


@register("GlmForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GLM-4 as it was first published."""
    return _read(c, "glm", post_norm=False)


@register("Glm4ForCausalLM")
def read_later_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GLM-4-0414 or GLM-Z1."""
    return _read(c, "glm4", post_norm=True)


def _read(c: ConfigReader, family: str, *, post_norm: bool) -> ModelSpec:
    c.assume(num_key_value_heads=2, max_position_embeddings=131_072)
    c.assume(eos_token_id=[151_329, 151_336, 151_338])
    c.only("mlp_bias", (False,), False)
    dim = head_dim(c, 128)
    rotation = replace(rope(c, dim, partial=0.5), interleaved=True)
    heads = replace(attention(c, rotation, dim), qkv_bias=c.flag("attention_bias", True))
    layer = LayerSpec(heads, gated_mlp(c), post_norm=post_norm)
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), eps=1.5625e-7)
    return model_spec(c, family, spec, (*_POST_NORMS, *FUSED_MLP_RULES, *DENSE_RULES))

"""Phi 3, 3.5 and 4-mini: Llama with fused projections and long rope.

Source: Abdin et al. 2024, arXiv:2404.14219.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    FUSED_MLP_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec

_FUSED: tuple[Rule, ...] = (
    Rename("model.layers.{i}.self_attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight"),
    *FUSED_MLP_RULES,
)


@register("Phi3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Phi 3 or Phi-4-mini."""
    c.assume(
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,  # over one in rope_parameters, as in transformers
    )
    for key in ("rope_scaling", "rope_parameters"):
        scaling = c.get(key)
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else ""
        if kind == "yarn":  # as the first Phi 3 call longrope
            c.replace(**{key: {**scaling, "rope_type": "longrope"}})
    dim = head_dim(c)
    rotation = rope(c, dim, partial=1.0)
    if rotation.kind not in ("default", "longrope"):
        raise UnsupportedModelError(f"Phi 3 with a rope of type {rotation.kind!r} isn't built.")
    for key, plain in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("lm_head_bias", False),
        ("full_attn_mod", 1),
        ("interpolate_factor", 1),
    ):
        c.only(key, (plain,), plain)
    heads = replace(attention(c, rotation, dim), window=sliding_window(c, None))
    layers = (LayerSpec(heads, gated_mlp(c)),) * c.integer("num_hidden_layers")
    return model_spec(c, "phi3", decoder(c, layers), (*_FUSED, *DENSE_RULES))

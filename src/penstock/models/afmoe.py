"""AFMoE (Trinity): norms around each block, gated heads, and experts by sigmoids.

Three of four layers slide, and those that don't have no rotation.
Source: Arcee AI 2025, the models' cards; transformers' `afmoe`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    dense_first,
    expert_rules,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    routed_experts,
    shared_rules,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec

_AT = "model.layers.{i}"
_OWN: tuple[Rule, ...] = (
    Rename(f"{_AT}.self_attn.gate_proj.weight", "layers.{i}.attention.gate.weight"),
    Rename(f"{_AT}.post_attention_layernorm.weight", "layers.{i}.attention_post_norm.weight"),
    Rename(f"{_AT}.pre_mlp_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Rename(f"{_AT}.post_mlp_layernorm.weight", "layers.{i}.mlp_post_norm.weight"),
    Rename(f"{_AT}.mlp.expert_bias", "layers.{i}.mlp.correction.weight"),
    *expert_rules("mlp", "gate_proj", "up_proj", "down_proj", "router.gate"),
    *shared_rules("shared_experts"),
    *QK_NORM_RULES,
    *DENSE_RULES,
)
_BUILT = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
_BUILT |= {"num_expert_groups": 1, "num_limited_groups": 1}
_UNUSED = ("load_balance_coeff", "use_grouped_mm", "rope_type")


@register("AfmoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Trinity; what trains its router is left."""
    c.assume(
        max_position_embeddings=16_384, head_dim=128, moe_intermediate_size=1408,
        intermediate_size=6144,
    )  # fmt: skip
    for key, built in _BUILT.items():
        c.only(key, (built,), built)
    for key in _UNUSED:
        c.get(key)
    c.replace(  # DeepSeek's names
        n_routed_experts=c.integer("num_experts", 64),
        n_shared_experts=c.integer("num_shared_experts", 2),
        routed_scaling_factor=c.positive("route_scale", 1.0),
    )
    mixed = routed_experts(c, 64, 6, normalize=True, scale=1.0, groups=1)
    blocks = dense_first(c, gated_mlp(c), mixed, 1, "num_dense_layers")
    dim = head_dim(c)
    base = attention(c, rope(c, dim), dim)
    base = replace(base, qk_norm="head", gated=True)
    c.only("attention_bias", (False,), False)
    every = c.integer("global_attn_every_n_layers", 4)
    windows = layer_windows(c, len(blocks), sliding_window(c, 1024), lambda i: (i + 1) % every > 0)
    layers = [
        LayerSpec(replace(base, window=w, rope=base.rope if w else None), block, post_norm=True)
        for w, block in zip(windows, blocks, strict=True)
    ]
    scale = math.sqrt(c.integer("hidden_size")) if c.flag("mup_enabled", False) else 1.0
    spec = decoder(c, layers, eps=1e-5, embed_scale=scale)
    return model_spec(c, "afmoe", replace(spec, embed_scale_rounds=False), _OWN)

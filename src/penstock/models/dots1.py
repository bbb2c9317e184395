"""dots.llm1: heads with norms, as Qwen 3 has them, and DeepSeek-V3's experts.

Source: rednote-hilab 2025, arXiv:2506.05767.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    SHARED_RULES,
    attention,
    decoder,
    dense_first,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    routed_experts,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Dots1ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dots.llm1."""
    c.assume(num_key_value_heads=32, moe_intermediate_size=1408, topk_group=1)
    c.get("use_sliding_window")  # max_window_layers and sliding_window count, as in transformers
    if c.get("scoring_func") == "noaux_tc":  # published ones mean sigmoids with a correction
        c.replace(scoring_func="sigmoid")
    dim = head_dim(c)
    base = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    mixed = routed_experts(
        c, c.integer("n_routed_experts"), c.integer("num_experts_per_tok"),
        normalize=False, scale=1.0, groups=1,
    )  # fmt: skip
    blocks = dense_first(c, gated_mlp(c), mixed, 0)
    window, first = sliding_window(c, 4096), c.number("max_window_layers", 62)
    windows = layer_windows(c, len(blocks), window, lambda i: window > 0 and i >= first)
    layers = [
        LayerSpec(replace(base, qk_norm="head", window=w), block)
        for w, block in zip(windows, blocks, strict=True)
    ]
    rules = (*QK_NORM_RULES, *SHARED_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "dots1", decoder(c, layers), rules)

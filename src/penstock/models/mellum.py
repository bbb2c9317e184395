"""Mellum 2: Qwen 3 with experts, some of whose layers slide and rotate by an angle of their own.

Source: JetBrains 2026, the model's card; transformers' `mellum`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    layer_windows,
    mixed_blocks,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import layer_ropes
from penstock.models.spec import Ignore, ModelSpec
from penstock.nn.spec import LayerSpec

_RULES = (Ignore("mtp.*"), *QK_NORM_RULES, *EXPERT_RULES, *DENSE_RULES)
_UNUSED = (
    "router_aux_loss_coef num_mtp_layers num_nextn_predict_layers mtp_layer_types "
    "mtp_mlp_layer_types"
).split()
"""Of training, and of what guesses."""


@register("MellumForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Mellum 2."""
    c.assume(
        num_key_value_heads=4, max_position_embeddings=131_072, head_dim=128,
        moe_intermediate_size=896, intermediate_size=7168,
    )  # fmt: skip
    for key in _UNUSED:
        c.get(key)
    dim = head_dim(c)
    local_rope, global_rope = layer_ropes(c, dim, local_theta=10_000.0, global_theta=500_000.0)
    base = attention(c, global_rope, dim, bias=c.flag("attention_bias", False))
    normalize = c.flag("norm_topk_prob", True)
    mixed = experts(c, 64, 8, "moe_intermediate_size", normalize=normalize)
    blocks = mixed_blocks(c, gated_mlp(c), mixed, 0)
    windows = layer_windows(c, len(blocks), sliding_window(c, 1024), lambda _: False)
    base = replace(base, qk_norm="head")
    layers = [
        LayerSpec(replace(base, window=w, rope=local_rope if w else global_rope), block)
        for w, block in zip(windows, blocks, strict=True)
    ]
    return model_spec(c, "mellum", decoder(c, layers), _RULES)

"""MiniMax-M2: experts by sigmoids, norms over all heads of q and of k, of which a part turns.

Source: MiniMax 2025, the model's card; transformers' `minimax_m2`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    expert_rules,
    experts,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec

_RULES: tuple[Rule, ...] = (
    *(
        Rename(
            f"model.layers.{{i}}.{block}.e_score_correction_bias",
            "layers.{i}.mlp.correction.weight",
        )
        for block in ("block_sparse_moe", "mlp")
    ),
    *expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    *EXPERT_RULES,  # as transformers has them in memory
    *QK_NORM_RULES,
    *DENSE_RULES,
)
_BUILT = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "sliding_window": None,
    "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
_UNUSED = (
    "router_aux_loss_coef router_jitter_noise use_mtp num_mtp_modules mtp_transformer_layers "
    "mlp_intermediate_size shared_moe_mode layernorm_linear_attention_beta"
).split()
"""Of training, of what guesses, and of blocks and layers that it hasn't."""


@register("MiniMaxM2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a MiniMax-M2."""
    c.assume(
        num_key_value_heads=8, max_position_embeddings=196_608, head_dim=128,
        intermediate_size=1536,
    )  # fmt: skip
    for key, built in _BUILT.items():
        c.only(key, (built,), built)
    for key in _UNUSED:
        c.get(key)
    count, dim = c.integer("num_hidden_layers"), head_dim(c)
    if c.get("attn_type_list", [1] * count) != [1] * count:
        raise UnsupportedModelError(
            f"attn_type_list asks for others than {count} layers of softmax attention (1)."
        )
    if c.has("rotary_dim"):
        c.assume(partial_rotary_factor=c.integer("rotary_dim") / dim)
    heads = attention(c, rope(c, dim, theta=5_000_000.0, partial=1.0), dim)
    mixed = experts(c, 256, 8, "intermediate_size", normalize=True)
    assert mixed.experts is not None
    mixed = replace(mixed, experts=replace(mixed.experts, sigmoid=True, correction=True))
    layers = (LayerSpec(replace(heads, qk_norm="full"), mixed),) * count
    return model_spec(c, "minimax_m2", decoder(c, layers), _RULES)

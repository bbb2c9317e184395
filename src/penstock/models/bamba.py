"""Bamba: Llama's blocks, most of whose layers have Mamba 2 where others attend.

Source: IBM, Princeton, CMU and UIUC 2024, the model's card; transformers' `bamba`.
"""

from __future__ import annotations

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
    some_attend,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.mamba import MAMBA_RULES, mamba_heads
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import LayerSpec

_AT = "model.layers.{i}"
BLOCK_RULES: tuple[Rule, ...] = (
    Rename("model.final_layernorm.weight", "norm.weight"),
    Rename(f"{_AT}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Stack(
        (f"{_AT}.feed_forward.gate_proj.{{p}}", f"{_AT}.feed_forward.up_proj.{{p}}"),
        "layers.{i}.mlp.up.{p}",
    ),
    Rename(f"{_AT}.feed_forward.down_proj.{{p}}", "layers.{i}.mlp.down.{p}"),
    *MAMBA_RULES,
    *DENSE_RULES,
)
"""Names of all of its tensors."""


@register("BambaForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Bamba."""
    c.assume(num_key_value_heads=8, max_position_embeddings=262_144)
    for key in ("num_logits_to_keep", "z_loss_coefficient"):
        c.get(key)  # of training, or of transformers' memory
    c.only("partial_rotary_factor", (0.5,), 0.5)  # where it is said beside others, it counts
    dim, count = head_dim(c), c.integer("num_hidden_layers")
    turns = rope(c, dim, partial=0.5)
    c.only("attn_rotary_emb", (turns.rotary_dim,), turns.rotary_dim)
    attends = attention(c, turns, dim, bias=c.flag("attention_bias", False))
    remembers = mamba_heads(c, c.number("rms_norm_eps", 1e-5))
    at = c.get("attn_layer_indices") or []
    if not isinstance(at, list) or any(type(i) is not int or not 0 <= i < count for i in at):
        raise UnsupportedModelError(
            f"attn_layer_indices must be a list of some of the layers 0 to {count - 1}: {at!r}"
        )
    kinds = some_attend([attends if i in at else remembers for i in range(count)])
    layers = [LayerSpec(kind, gated_mlp(c)) for kind in kinds]
    return model_spec(c, "bamba", decoder(c, layers, eps=1e-5), BLOCK_RULES)

"""What families with attention over latents (MLA) share: keys of configs, names of weights."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.rope import rope
from penstock.models.spec import Rename, Rule
from penstock.nn.spec import AttentionSpec, LatentSpec

_AT = "model.layers.{i}.self_attn"


LATENT_RULES: tuple[Rule, ...] = tuple(
    Rename(f"{_AT}.{theirs}", f"layers.{{i}}.attention.{ours}")
    for theirs, ours in (
        ("q_proj.weight", "q.weight"),
        ("q_a_proj.{p}", "q_down.{p}"),
        ("q_a_layernorm.weight", "q_norm.weight"),
        ("q_b_proj.weight", "q_up.weight"),
        ("kv_a_proj_with_mqa.{p}", "kv.{p}"),
        ("kv_a_layernorm.weight", "kv_norm.weight"),
        ("kv_b_proj.weight", "heads.weight"),
    )
)
"""DeepSeek's names."""


def latent_attention(c: ConfigReader, *, query_rank: int | None) -> AttentionSpec:
    """Attention over latents in DeepSeek's names; query_rank: the family's default, None for none.

    What stretches a context (yarn with `mscale_all_dim`) also sharpens scores.
    """
    heads = c.integer("num_attention_heads")
    if c.integer("num_key_value_heads", heads) != heads:
        raise UnsupportedModelError(
            f"num_key_value_heads {c.get('num_key_value_heads')} isn't num_attention_heads "
            f"{heads}: heads that share keys aren't built for attention over latents."
        )
    plain, turning = c.integer("qk_nope_head_dim", 128), c.integer("qk_rope_head_dim", 64)
    for key in ("qk_head_dim", "head_dim"):  # of what is there anyway
        c.get(key)
    rank = c.nullable("q_lora_rank", query_rank)
    bias = c.flag("attention_bias", False)
    turns = replace(rope(c, turning), interleaved=c.flag("rope_interleave", True))
    sharp = _sharpening(c) if turns.kind == "yarn" else 0.0
    stretch = 1.0 + 0.1 * sharp * math.log(max(turns.factor, 1.0))
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=plain + turning,
        scale=(plain + turning) ** -0.5 * stretch**2,
        rope=turns,
        qkv_bias=bias,
        out_bias=bias,
        latent=LatentSpec(
            rank=c.integer("kv_lora_rank", 512),
            value_dim=c.integer("v_head_dim", 128),
            query_rank=0 if rank is None else c.integer("q_lora_rank", query_rank),
        ),
    )


def _sharpening(c: ConfigReader) -> float:
    scaling = c.nested("rope_parameters") or c.nested("rope_scaling")
    return 0.0 if scaling is None else scaling.number("mscale_all_dim", 0.0)

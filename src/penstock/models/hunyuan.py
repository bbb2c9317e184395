"""Hunyuan, dense: Llama with a norm on each head of q and k after their rotation.

Source: Tencent Hunyuan Team 2025, the model cards of Hunyuan-0.5B to 7B.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec

_NORMS: tuple[Rule, ...] = tuple(
    Rename(
        f"model.layers.{{i}}.self_attn.{theirs}_layernorm.weight",
        f"layers.{{i}}.attention.{ours}_norm.weight",
    )
    for theirs, ours in (("query", "q"), ("key", "k"))
)


@register("HunYuanDenseV1ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Hunyuan."""
    for key, built in (("use_qk_norm", True), ("use_cla", False), ("use_rotary_pos_emb", True)):
        c.only(key, (built,), built)
    c.get("eod_token_id")  # what ends a text says generation_config.json
    dim = head_dim(c)
    c.only("attention_head_dim", (dim,), dim)
    _stretch_base(c, dim)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    layer = LayerSpec(replace(heads, qk_norm="turned"), gated_mlp(c))
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), eps=1e-5)
    return model_spec(c, "hunyuan_v1_dense", spec, (*_NORMS, *DENSE_RULES))


def _stretch_base(c: ConfigReader, dim: int) -> None:
    """A dynamic rope with an `alpha` is one whose base is θ · α^(D / (D − 2)), at any length."""
    for key in ("rope_parameters", "rope_scaling"):
        given = c.nested(key)
        if given is None or given.get("rope_type", given.get("type")) != "dynamic":
            continue
        if not given.has("alpha") or not given.number("alpha"):
            continue
        theta = given.number("rope_theta", c.number("rope_theta", 10_000.0))
        theta *= given.positive("alpha") ** (dim / (dim - 2))
        c.replace(**{key: {"rope_type": "default", "rope_theta": theta}})

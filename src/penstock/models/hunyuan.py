"""Hunyuan, dense and with experts: Llama with a norm on each head of q and k after their rotation.

Source: Tencent Hunyuan Team 2025, the model cards of Hunyuan-0.5B to 7B and of Hunyuan-A13B.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    attention,
    check_choice,
    decoder,
    expert_rules,
    gated_mlp,
    head_dim,
    model_spec,
    shared_rules,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec

_NORMS: tuple[Rule, ...] = tuple(
    Rename(
        f"model.layers.{{i}}.self_attn.{theirs}_layernorm.weight",
        f"layers.{{i}}.attention.{ours}_norm.weight",
    )
    for theirs, ours in (("query", "q"), ("key", "k"))
)


_EXPERTS: tuple[Rule, ...] = (
    Rename("model.layers.{i}.mlp.gate.wg.weight", "layers.{i}.mlp.router.weight"),
    *expert_rules("mlp", "gate_proj", "up_proj", "down_proj"),
    *shared_rules("shared_mlp"),
)
_ELSEWHERE = (
    "num_experts moe_topk num_shared_expert moe_intermediate_size norm_topk_prob "
    "routed_scaling_factor"
).split()
"""Of experts; some are lists of what each layer has."""
_OFF = (
    "use_mla group_limited_greedy n_group topk_group moe_drop_tokens moe_layer_num_skipped "
    "position_embedding_xdrope moe_random_routing_dropped_token q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim xdrope_section"
).split()
"""What isn't built, or changes nothing where it is off."""


@register("HunYuanDenseV1ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Hunyuan."""
    layer = LayerSpec(_heads(c), gated_mlp(c))
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), eps=1e-5)
    return model_spec(c, "hunyuan_v1_dense", spec, (*_NORMS, *DENSE_RULES))


@register("HunYuanMoEV1ForCausalLM")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Hunyuan with experts."""
    for key in _OFF:
        c.only(key, (None, False, 0), None)
    for key in ("cla_share_factor", "use_mixed_mlp_moe"):  # the latter: there is a block beside
        c.get(key)
    layer = LayerSpec(_heads(c), _mixed(c))
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), eps=1e-5)
    return model_spec(c, "hunyuan_v1_moe", spec, (*_NORMS, *_EXPERTS, *DENSE_RULES))


def _heads(c: ConfigReader) -> AttentionSpec:
    for key, built in (("use_qk_norm", True), ("use_cla", False), ("use_rotary_pos_emb", True)):
        c.only(key, (built,), built)
    c.get("eod_token_id")  # what ends a text says generation_config.json
    dim = head_dim(c, c.get("attention_head_dim"))
    c.only("attention_head_dim", (dim,), dim)
    _stretch_base(c, dim)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    return replace(heads, qk_norm="turned")


def _mixed(c: ConfigReader) -> MlpSpec:
    """Experts, and beside them a block of their size: the same in all layers."""
    c.only("mlp_bias", (False,), False)
    dense, layers = gated_mlp(c), c.integer("num_hidden_layers")
    same = {key: _of_all(key, c.get(key), layers) for key in _ELSEWHERE}
    c.replace(**{key: value for key, value in same.items() if value is not None})
    c.only("moe_intermediate_size", (dense.intermediate,), dense.intermediate)
    c.only("num_shared_expert", (1,), 1)
    c.only("norm_topk_prob", (True,), True)
    c.only("routed_scaling_factor", (1, False), 1)
    total, chosen = c.integer("num_experts", 1), c.integer("moe_topk", 1)
    check_choice("moe_topk", chosen, total)
    c.only("num_local_experts", (total,), total)  # another name of them
    own = ExpertsSpec(total, chosen, normalize=True, shared=dense.intermediate)
    return replace(dense, experts=own)


def _of_all(key: str, given: Any, layers: int) -> Any:
    """What a list that names each layer's says of all of them."""
    if not isinstance(given, list):
        return given
    if len(given) != layers or any(one != given[0] for one in given):
        raise UnsupportedModelError(
            f"{key} must say the same of each of {layers} layers, not {given!r}."
        )
    return given[0]


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

"""LFM2: short convolutions between gates, every few layers attention; with experts or without.

Source: the models' cards, transformers' `lfm2` and `lfm2_moe`; arXiv:2511.23404.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    dense_first,
    expert_rules,
    experts,
    head_dim,
    layer_kinds,
    model_spec,
    some_attend,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import AttentionSpec, ConvSpec, LayerSpec, MlpSpec, NormSpec

_AT = "model.layers.{i}"
_RULES: tuple[Rule, ...] = (
    Rename("model.embedding_norm.weight", "norm.weight"),
    Rename(f"{_AT}.operator_norm.weight", "layers.{i}.attention_norm.weight"),
    Rename(f"{_AT}.ffn_norm.weight", "layers.{i}.mlp_norm.weight"),
    Rename(f"{_AT}.conv.in_proj.{{p}}", "layers.{i}.attention.mixed.{p}"),
    Rename(f"{_AT}.conv.conv.{{p}}", "layers.{i}.attention.conv.{p}"),
    Rename(f"{_AT}.conv.out_proj.{{p}}", "layers.{i}.attention.out.{p}"),
    Rename(f"{_AT}.self_attn.out_proj.{{p}}", "layers.{i}.attention.out.{p}"),
    Rename(f"{_AT}.self_attn.q_layernorm.weight", "layers.{i}.attention.q_norm.weight"),
    Rename(f"{_AT}.self_attn.k_layernorm.weight", "layers.{i}.attention.k_norm.weight"),
    Stack(
        (f"{_AT}.feed_forward.w1.weight", f"{_AT}.feed_forward.w3.weight"),
        "layers.{i}.mlp.up.weight",
    ),
    Rename(f"{_AT}.feed_forward.w2.weight", "layers.{i}.mlp.down.weight"),
    Rename(f"{_AT}.feed_forward.expert_bias", "layers.{i}.mlp.correction.weight"),
    *expert_rules("feed_forward", "w1", "w3", "w2"),
    *DENSE_RULES,
)

_DRAWN = """block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
    embedding_init_scale""".split()
"""Of how weights were drawn before training."""


def _kinds(c: ConfigReader) -> list[AttentionSpec]:
    """Each layer's attention, or the convolution in its place."""
    hidden, bias = c.integer("hidden_size"), c.flag("conv_bias", False)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        c.only(key, (hidden,), hidden)
    dim = head_dim(c)
    attends = replace(attention(c, rope(c, dim), dim), qk_norm="head")
    convolves = AttentionSpec(
        1, 1, hidden, 1.0, None, qkv_bias=bias, out_bias=bias,
        conv=ConvSpec(hidden, c.integer("conv_L_cache", 3), bias),
    )  # fmt: skip
    kinds = {"full_attention": attends, "conv": convolves}
    count, types = c.integer("num_hidden_layers"), c.get("layer_types")
    listed = c.get("full_attn_idxs")
    if listed is not None:
        named = _named(listed, count)
        if types not in (None, named):
            raise UnsupportedModelError(
                f"full_attn_idxs {listed!r} and layer_types {types!r} differ: leave one out."
            )
        types = named
    if types is None:
        types = _named(list(range(count)), count)
    return some_attend(layer_kinds("layer_types", types, kinds, count))


def _named(attending: Any, count: int) -> list[str]:
    """`layer_types` of the layers that attend."""
    if not isinstance(attending, list) or any(
        type(i) is not int or not 0 <= i < count for i in attending
    ):
        raise UnsupportedModelError(
            f"full_attn_idxs must be a list of some of the layers 0 to {count - 1}: {attending!r}"
        )
    return ["full_attention" if i in attending else "conv" for i in range(count)]


def _inner(c: ConfigReader) -> int:
    """What lies between an MLP's matrices: two thirds of what is said, in whole multiples."""
    key = "block_ff_dim" if c.has("block_ff_dim") else "intermediate_size"
    size = c.integer(key, 12_288)
    c.get("intermediate_size")
    multiple, times = c.integer("block_multiple_of", 256), 1.0
    if c.nullable("block_ffn_dim_multiplier", 1.0) is not None:
        times = c.positive("block_ffn_dim_multiplier", 1.0)
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    wide = times * int(2 * size / 3)
    if not 1 <= wide < 2**31:
        raise UnsupportedModelError(
            f"config.json: {key} {size} times block_ffn_dim_multiplier {times:g} is no size."
        )
    return multiple * -(-int(wide) // multiple)


def _spec(c: ConfigReader, blocks: list[MlpSpec], name: str) -> ModelSpec:
    for key in _DRAWN:
        c.get(key)
    heads = c.integer("num_attention_heads")
    c.only("num_heads", (heads,), heads)
    c.only("hidden_act", ("silu", "swish"), "silu")
    c.only("block_use_swiglu", (True,), True)
    c.only("use_pos_enc", (True,), True)
    layers = [LayerSpec(a, mlp) for a, mlp in zip(_kinds(c), blocks, strict=True)]
    eps = c.number("norm_eps", 1e-5)
    c.only("block_norm_eps", (eps,), eps)
    if c.has("tie_embedding"):
        c.replace(tie_word_embeddings=c.flag("tie_embedding", True))
    spec = decoder(c, layers, tied=True, norm=NormSpec(eps=eps))
    return model_spec(c, name, spec, _RULES)


def _assume(c: ConfigReader) -> None:
    c.assume(num_key_value_heads=8, max_position_embeddings=128_000, rope_theta=1_000_000.0)
    theta = c.number("rope_theta")
    if c.number("theta", theta) != theta:
        raise UnsupportedModelError(
            f"config.json says theta {c.number('theta')} and rope_theta {theta}, of which the "
            "second counts: leave the first out."
        )


@register("Lfm2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense LFM2."""
    _assume(c)
    mlp = MlpSpec(_inner(c))
    return _spec(c, [mlp] * c.integer("num_hidden_layers"), "lfm2")


@register("Lfm2MoeForCausalLM")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an LFM2 with experts, of which the first layers have none."""
    _assume(c)
    c.assume(moe_intermediate_size=1792, intermediate_size=7168)
    mixed = experts(c, 32, 4, "moe_intermediate_size", normalize=c.flag("norm_topk_prob", True))
    assert mixed.experts is not None
    mixed = replace(
        mixed,
        experts=replace(
            mixed.experts,
            sigmoid=True,
            correction=c.flag("use_expert_bias", True),
            scale=c.positive("routed_scaling_factor", 1.0),
            eps=1e-6,
        ),
    )
    dense = MlpSpec(c.integer("intermediate_size"))
    return _spec(c, dense_first(c, dense, mixed, 2, "num_dense_layers"), "lfm2_moe")

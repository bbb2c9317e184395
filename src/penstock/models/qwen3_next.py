"""Qwen3-Next: three layers of four have a gated delta rule, the fourth attention with a gate.

Source: the model's card and transformers' `qwen3_next`; Yang et al. 2024, arXiv:2412.06464 (gated
delta rule); Qiu et al. 2025, arXiv:2505.06708 (gated attention).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    layer_kinds,
    mixing_layers,
    model_spec,
    shared_rules,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2_moe import SHARED_GATE
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Share, Stack
from penstock.nn.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MlpSpec

_AT = "model.layers.{i}.self_attn"
_DELTA = "model.layers.{i}.linear_attn"


def _attends(spec: DecoderSpec) -> AttentionSpec:
    return next(layer.attention for layer in spec.layers if layer.attention.gated)


def _remembers(spec: DecoderSpec) -> AttentionSpec:
    return next(layer.attention for layer in spec.layers if layer.attention.delta is not None)


def _without_gates(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of each head's query and gate, then keys and values → queries, keys, values."""
    a = _attends(spec)
    rows = 2 * a.num_heads * a.head_dim
    queries = tensor[:rows].unflatten(0, (a.num_heads, 2, a.head_dim))[:, 0].flatten(0, 1)
    return torch.cat((queries, tensor[rows:]))


def _only_gates(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """The gates of the same."""
    a = _attends(spec)
    gates: Tensor = tensor.unflatten(0, (a.num_heads, 2, a.head_dim))[:, 1]
    return gates.flatten(0, 1)


def _mixed(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of each key head's query, key, values and their gates → all queries, all keys, …"""
    a = _remembers(spec)
    keys, dim = a.num_kv_heads, a.head_dim
    values = a.out_dim // keys
    parts = tensor.unflatten(0, (keys, -1)).split((dim, dim, values, values), 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _gates(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of each key head's b, then a of as many → all a, all b."""
    keys = _remembers(spec).num_kv_heads
    b, a = tensor.unflatten(0, (keys, 2, -1)).unbind(1)
    return torch.cat((a.flatten(0, 1), b.flatten(0, 1)))


HYBRID_RULES: tuple[Rule, ...] = (
    Stack(
        tuple(f"{_AT}.{x}_proj.{{p}}" for x in "qkv"),
        "layers.{i}.attention.qkv.{p}",
        _without_gates,
        of_rows=True,
    ),
    Share(f"{_AT}.q_proj.{{p}}", "layers.{i}.attention.gate.{p}", _only_gates, of_rows=True),
    Rename(f"{_DELTA}.conv1d.weight", "layers.{i}.attention.conv.weight"),
    Rename(f"{_DELTA}.A_log", "layers.{i}.attention.rates.weight"),
    Rename(f"{_DELTA}.dt_bias", "layers.{i}.attention.shift.weight"),
    Rename(f"{_DELTA}.norm.weight", "layers.{i}.attention.norm.weight"),
    Rename(f"{_DELTA}.out_proj.weight", "layers.{i}.attention.out.weight"),
    Ignore("mtp.*"),  # layers that guess tokens ahead: nothing reads them
    *QK_NORM_RULES,
)
"""Names of both kinds of layers, but for the delta rule's projections."""

_RULES: tuple[Rule, ...] = (
    Rename(
        f"{_DELTA}.in_proj_qkvz.weight", "layers.{i}.attention.mixed.weight", _mixed, of_rows=True
    ),
    Rename(f"{_DELTA}.in_proj_ba.weight", "layers.{i}.attention.gates.weight", _gates),
    *HYBRID_RULES,
)

MIXED_RULES: tuple[Rule, ...] = (SHARED_GATE, *shared_rules("shared_expert"), *EXPERT_RULES)
"""Names of experts, and of the block beside them."""


def hybrid_layers(c: ConfigReader) -> list[AttentionSpec]:
    """Each layer's attention, or what it has in its place."""
    dim = head_dim(c, 256)
    c.only("attn_output_gate", (True,), True)
    c.only("output_gate_type", ("swish", "silu"), "swish")
    c.only("hidden_act", ("swish", "silu"), "silu")  # the convolution's too, and that is built so
    c.get("mamba_ssm_dtype")  # states are float32 here
    turning = c.get("rope_parameters")
    if isinstance(turning, dict) and turning.get("mrope_interleaved"):  # transformers' sections
        c.replace(rope_parameters={"mrope_section": [11, 11, 10], **turning})
    turns = rope(c, dim, partial=0.25)
    attends = attention(c, turns, dim, bias=c.flag("attention_bias", False))
    attends = replace(attends, qk_norm="head", gated=True)
    keys, values = c.integer("linear_num_key_heads", 16), c.integer("linear_num_value_heads", 32)
    key_dim = c.integer("linear_key_head_dim", 128)
    if values % keys or key_dim % 16:
        raise UnsupportedModelError(
            f"linear_num_value_heads {values} and linear_num_key_heads {keys} of {key_dim} "
            "dimensions aren't built: the first must be a multiple of the second, and dimensions "
            "one of 16."
        )
    delta = DeltaSpec(
        c.integer("linear_value_head_dim", 128), c.integer("linear_conv_kernel_dim", 4)
    )
    remembers = AttentionSpec(values, keys, key_dim, key_dim**-0.5, None, delta=delta)
    kinds = {"full_attention": attends, "linear_attention": remembers}
    return both_kinds(c, kinds, "full_attention_interval")


def both_kinds(
    c: ConfigReader, kinds: Mapping[str, AttentionSpec], interval: str
) -> list[AttentionSpec]:
    """What each layer is of `kinds`, as `layer_types` says, or where that is absent `interval`: a
    key for how many layers one attends of. Where both are there the first counts, as transformers
    has it, and a warning says so if they differ.
    """
    count, every = c.integer("num_hidden_layers"), c.integer(interval, 4)
    named = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    types = c.get("layer_types", named)
    found = layer_kinds("layer_types", types, kinds, count)
    if len(set(types)) < 2:
        said = f"{interval} {every} of {count} layers" if types is named else "layer_types"
        raise UnsupportedModelError(
            f"{said} names {types[0]} alone; models that have both kinds of layers are built."
        )
    if c.has(interval) and types != named:
        warnings.warn(
            f"config.json says by {interval} {every} that other layers attend than by layer_types, "
            "which counts.",
            UserWarning,
            stacklevel=3,
        )
    return found


def mixed_experts(c: ConfigReader, count: int, per_token: int, *, normalize: bool) -> MlpSpec:
    """Experts, and a block beside them that each token takes a share of."""
    c.get("router_aux_loss_coef")
    found = experts(c, count, per_token, "moe_intermediate_size", normalize=normalize)
    assert found.experts is not None
    shared = c.integer("shared_expert_intermediate_size", 512)
    return replace(found, experts=replace(found.experts, shared=shared, shared_gate=True))


@register("Qwen3NextForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen3-Next; what trains its router, and what guesses ahead, is left."""
    c.assume(
        num_key_value_heads=2, max_position_embeddings=32_768, intermediate_size=5632,
        moe_intermediate_size=512,
    )  # fmt: skip
    mixed = mixed_experts(c, 512, 10, normalize=c.flag("norm_topk_prob", True))
    dense, attends = gated_mlp(c), hybrid_layers(c)
    layers = [
        LayerSpec(each, mixed if mixes else dense)
        for each, mixes in zip(attends, mixing_layers(c, len(attends)), strict=True)
    ]
    rules = (*_RULES, *MIXED_RULES, *DENSE_RULES)
    return model_spec(c, "qwen3_next", decoder(c, layers, offset=1.0), rules)

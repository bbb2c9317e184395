"""Qwen 1.5 and 2 with experts, and a block beside them that each token takes a share of.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    layer_windows,
    mixing_layers,
    model_spec,
    shared_rules,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import DecoderSpec, LayerSpec


def _flat(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """[1, D] → [D]."""
    return tensor.flatten()


SHARED_GATE = Rename(
    "model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight", _flat
)
"""What says how much of the block beside experts a token takes."""

_SHARED_RULES: tuple[Rule, ...] = (SHARED_GATE, *shared_rules("shared_expert"))


@register("Qwen2MoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen 1.5 or 2 with experts; what trains its router is left."""
    c.assume(
        num_key_value_heads=16, max_position_embeddings=32_768, intermediate_size=5632,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    )  # fmt: skip
    c.get("router_aux_loss_coef")
    dim = head_dim(c)
    base = replace(attention(c, rope(c, dim), dim), qkv_bias=c.flag("qkv_bias", True))
    normalize = c.flag("norm_topk_prob", False)
    mixed = experts(c, 60, 4, "moe_intermediate_size", normalize=normalize)
    assert mixed.experts is not None
    shared = c.integer("shared_expert_intermediate_size")
    mixed = replace(mixed, experts=replace(mixed.experts, shared=shared, shared_gate=True))
    count, dense = c.integer("num_hidden_layers"), gated_mlp(c)
    layers = [
        LayerSpec(replace(base, window=window), mixed if mixes else dense)
        for window, mixes in zip(_windows(c, count), mixing_layers(c, count), strict=True)
    ]
    rules = (*_SHARED_RULES, *EXPERT_RULES, *DENSE_RULES)
    return model_spec(c, "qwen2_moe", decoder(c, layers), rules)


def _windows(c: ConfigReader, count: int) -> tuple[int, ...]:
    """As transformers has it: with `use_sliding_window`, every other layer of the first
    `max_window_layers`; else `sliding_window` says nothing, and may be 0.
    """
    first = c.number("max_window_layers", 28)
    if c.flag("use_sliding_window", False):
        window = sliding_window(c, 4096)
    else:
        window = 0
        c.get("sliding_window")
    return layer_windows(c, count, window, lambda i: window > 0 and i % 2 == 0 and i < first)

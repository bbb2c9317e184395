"""Granite with windows: three of four layers slide, heads have sinks, layers their own rotations.

Source: transformers' `granite_swa` and `granitemoe_swa`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    SINK_RULES,
    decoder,
    gated_mlp,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.granite import granite_heads, with_multipliers
from penstock.models.granite_moe import EXPERTS, block_rules, mixed_block, shared_size
from penstock.models.registry import register
from penstock.models.spec import ModelSpec
from penstock.nn.spec import AttentionSpec, LayerSpec


@register("GraniteSWAForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Granite with windows."""
    c.assume(num_key_value_heads=4, max_position_embeddings=8192)
    mlp = gated_mlp(c)
    spec = decoder(c, [LayerSpec(a, mlp) for a in _heads(c)], tied=True, eps=1e-5)
    return model_spec(c, "granite_swa", with_multipliers(c, spec), (*SINK_RULES, *DENSE_RULES))


@register("GraniteMoeSWAForCausalLM")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """The same with experts, and perhaps a block beside them."""
    mlp = mixed_block(c, shared_size(c, 0))
    spec = with_multipliers(c, decoder(c, [LayerSpec(a, mlp) for a in _heads(c)]))
    rules = (*SINK_RULES, *EXPERTS, *block_rules("mlp.shared"), *DENSE_RULES)
    return model_spec(c, "granite_moe_swa", spec, rules)


def _heads(c: ConfigReader) -> list[AttentionSpec]:
    """Each layer's attention."""
    base, window = replace(granite_heads(c), sinks=True), sliding_window(c, 128)
    count = c.integer("num_hidden_layers")
    windows = layer_windows(c, count, window, lambda i: window > 0 and i % 4 > 0)
    thetas = c.get("layer_rope_theta")
    if thetas is None:
        return [replace(base, window=w) for w in windows]
    if not isinstance(thetas, list) or len(thetas) != count:
        raise UnsupportedModelError(f"layer_rope_theta must name {count} layers, not {thetas!r}.")
    turn = _turning(base)
    each = [turn(theta) for theta in thetas]
    return [replace(own, window=w) for own, w in zip(each, windows, strict=True)]


def _turning(base: AttentionSpec) -> Callable[[Any], AttentionSpec]:
    """`base` with another base of its rotation; 0: there is none."""

    def turn(theta: Any) -> AttentionSpec:
        if theta == 0:
            return replace(base, rope=None)
        found = ConfigReader({"layer_rope_theta": theta}).positive("layer_rope_theta")
        return replace(base, rope=None if base.rope is None else replace(base.rope, theta=found))

    return turn

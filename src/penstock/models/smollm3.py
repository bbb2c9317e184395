"""SmolLM3: Llama with no rotation in every fourth layer. Source: Yang et al., arXiv:2501.18795."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("SmolLM3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a SmolLM3."""
    c.assume(num_key_value_heads=4, max_position_embeddings=32_768)
    dim = head_dim(c)
    rotation = rope(c, dim, theta=2_000_000.0)
    base, mlp = attention(c, rotation, dim, bias=c.flag("attention_bias", False)), gated_mlp(c)
    rotates = _rotating_layers(c, c.integer("num_hidden_layers"))
    window = sliding_window(c, None)
    window = window if c.flag("use_sliding_window", False) else 0
    c.get("max_window_layers")  # Qwen's; SmolLM3 goes by no_rope_layers
    windows = layer_windows(c, len(rotates), window, lambda i: window > 0 and not rotates[i])
    layers = [
        LayerSpec(replace(base, window=w, rope=rotation if turns else None), mlp)
        for w, turns in zip(windows, rotates, strict=True)
    ]
    return model_spec(c, "smollm3", decoder(c, layers, tied=True), DENSE_RULES)


def _rotating_layers(c: ConfigReader, count: int) -> list[bool]:
    """Which layers rotate; `no_rope_layers`, in spite of its name, has 1 for those that do."""
    every = c.integer("no_rope_layer_interval", 4)
    given = c.get("no_rope_layers")
    if given is None:
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(given, list) or len(given) < count or any(g not in (0, 1) for g in given):
        raise UnsupportedModelError(
            f"no_rope_layers must hold 0 or 1 for {count} layers: {given!r}"
        )
    return [bool(g) for g in given[:count]]

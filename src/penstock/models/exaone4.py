"""EXAONE 4: norms after each block and on each head of q and k; layers that see all don't rotate.

Source: LG AI Research 2025, arXiv:2507.11407.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
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
from penstock.nn.spec import AttentionSpec, LayerSpec


@register("Exaone4ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an EXAONE 4."""
    mlp = gated_mlp(c)
    layers = [LayerSpec(a, mlp, pre_norm=False, post_norm=True) for a in exaone_heads(c)]
    rules = (*QK_NORM_RULES, *SANDWICH_RULES, *DENSE_RULES)
    return model_spec(c, "exaone4", decoder(c, layers, eps=1e-5), rules)


def exaone_heads(c: ConfigReader) -> list[AttentionSpec]:
    """Each layer's attention; where `sliding_window` is null, all layers rotate."""
    c.assume(num_key_value_heads=32)
    for key in ("attention_bias", "mlp_bias"):
        c.only(key, (False,), False)
    dim = head_dim(c)
    base = replace(attention(c, rope(c, dim), dim), qk_norm="head")
    window = sliding_window(c, 4096)
    pattern = _pattern(c, window)
    windows = layer_windows(
        c,
        c.integer("num_hidden_layers"),
        window,
        lambda i: pattern[i % len(pattern)] == "L",
    )
    return [replace(base, window=w, rope=base.rope if w or not window else None) for w in windows]


def _pattern(c: ConfigReader, window: int) -> str:
    """Which layers slide (`L`) and which see all (`G`), over and over; 4 stands for LLLG."""
    given = c.get("sliding_window_pattern", 4)
    if not window:  # then nobody asks it
        return "G"
    if type(given) is int and 0 < given < 1000:
        return "L" * (given - 1) + "G"
    if isinstance(given, str) and given and set(given) <= set("LG"):
        return given
    raise UnsupportedModelError(
        f"sliding_window_pattern must be a number of layers or letters L and G: {given!r}"
    )

"""Gemma 2: every other layer local, soft-capped scores and logits, norms around each block.

VaultGemma has none behind them. Source: Gemma Team 2024, arXiv:2408.00118; VaultGemma: Sinha et al.
2025, arXiv:2510.15001.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    SANDWICH_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
    softcap,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec


@register("Gemma2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 2."""
    return _model(c, "gemma2", post_norm=True)


@register("VaultGemmaForCausalLM")
def read_vault_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a VaultGemma."""
    return _model(c, "vaultgemma", post_norm=False)


def _model(c: ConfigReader, family: str, *, post_norm: bool) -> ModelSpec:
    c.assume(num_key_value_heads=4, max_position_embeddings=8192)
    dim = head_dim(c, 256)
    base = attention(
        c,
        rope(c, dim),
        dim,
        scale=c.positive("query_pre_attn_scalar", 256) ** -0.5,
        bias=c.flag("attention_bias", False),
    )
    base = replace(base, softcap=softcap(c, "attn_logit_softcapping", 50.0))
    mlp = gated_mlp(c, "hidden_activation", "gelu_pytorch_tanh")
    c.get("hidden_act")  # an older spelling, which hidden_activation overrides
    window = sliding_window(c, 4096)
    c.only("sliding_window_size", (window,), window)
    windows = layer_windows(c, c.integer("num_hidden_layers"), window, lambda i: i % 2 == 0)
    spec = decoder(
        c,
        [LayerSpec(replace(base, window=w), mlp, post_norm=post_norm) for w in windows],
        tied=True,
        offset=1.0,
        embed_scale=math.sqrt(c.integer("hidden_size")),
        final_softcap=softcap(c, "final_logit_softcapping", 30.0),
    )
    return model_spec(c, family, spec, (*SANDWICH_RULES, *DENSE_RULES))

"""Arcee (AFM): Llama with squared ReLUs and no gate. Source: Arcee AI 2025, its model card."""

from __future__ import annotations

from penstock.models.common import (
    DENSE_RULES,
    UNGATED_RULES,
    attention,
    decoder,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec, MlpSpec


@register("ArceeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an Arcee."""
    c.assume(max_position_embeddings=4096)
    c.only("hidden_act", ("relu2",), "relu2")
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    mlp = MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation="relu2",
        gated=False,
        bias=c.flag("mlp_bias", False),
    )
    layers = (LayerSpec(heads, mlp),) * c.integer("num_hidden_layers")
    return model_spec(c, "arcee", decoder(c, layers, eps=1e-5), (*UNGATED_RULES, *DENSE_RULES))

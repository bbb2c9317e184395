"""Jais 2: Llama with layer norms, and squared ReLUs without gates.

Source: Inception 2025, the model's card; transformers' `jais2`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.models.common import DENSE_RULES, attention, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from penstock.ops import define_row_operator

RULES = (Rename("model.layers.{i}.mlp.up_proj.{p}", "layers.{i}.mlp.up.{p}"), *DENSE_RULES)


def relu2(x: Tensor) -> Tensor:
    """The reference: x [T, N]."""
    return torch.relu(x.float()).square().to(x.dtype)


def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Jais 2."""
    dim = head_dim(c)
    c.only("hidden_act", ("relu2",), "relu2")
    layer = LayerSpec(
        attention=attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", True)),
        mlp=MlpSpec(
            intermediate=c.integer("intermediate_size"),
            gated=False,
            bias=c.flag("mlp_bias", True),
            row_operator="relu2",
        ),
    )
    decoder = DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=c.integer("hidden_size"),
        layers=(layer,) * c.integer("num_hidden_layers"),
        norm=NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5), bias=True),
        max_position=c.integer("max_position_embeddings", 8192),
        tied=c.flag("tie_word_embeddings", False),
    )
    return model_spec(c, "jais2", decoder, RULES)


def plug_in() -> None:
    """What Penstock calls, once."""
    (library,) = Path(__file__).parent.glob("relu2.*.so")
    define_row_operator("relu2", relu2, library=library, symbol="relu2_rows")
    register("Jais2ForCausalLM")(read_config)

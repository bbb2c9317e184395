"""nanochat: squared ReLUs, and norms without weights: of embeddings and of heads too.

Heads turn the other way round: as if their halves were swapped. They are normed behind their turn,
which leaves a root-mean-square as it is. Source: Karpathy 2025, github.com/karpathy/nanochat.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.models.common import (
    DENSE_RULES,
    PLAIN_NORM_RULES,
    attention,
    decoder,
    head_dim,
    model_spec,
    softcap,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Ones, Rename, Rule, Stack
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec


def _normed(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Each token's row with a root-mean-square of 1: nothing comes between it and its norm."""
    rows = tensor.float()
    square = rows.square().mean(-1, keepdim=True)
    return (rows * (square + spec.norm.eps).rsqrt()).to(tensor.dtype)


def _swapped(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """The halves of each head of queries and keys."""
    a = spec.layers[0].attention
    turning = (a.num_heads + a.num_kv_heads) * a.head_dim
    heads = tensor[:turning].unflatten(0, (-1, 2, a.head_dim // 2)).flip(1)
    return torch.cat((heads.flatten(0, 2), tensor[turning:]))


_RULES: tuple[Rule, ...] = (
    *(Ones((), f"layers.{{i}}.attention.{x}_norm.weight") for x in "qk"),
    *PLAIN_NORM_RULES,
    Rename("model.embed_tokens.weight", "embed.weight", _normed),
    Stack(
        tuple(f"model.layers.{{i}}.self_attn.{x}_proj.{{p}}" for x in "qkv"),
        "layers.{i}.attention.qkv.{p}",
        _swapped,
        of_rows=True,
    ),
    Rename("model.layers.{i}.mlp.fc1.weight", "layers.{i}.mlp.up.weight"),
    Rename("model.layers.{i}.mlp.fc2.weight", "layers.{i}.mlp.down.weight"),
    *DENSE_RULES,
)


@register("NanoChatForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a nanochat."""
    c.only("hidden_act", ("relu2",), "relu2")
    c.only("tie_word_embeddings", (False,), False)
    c.only("qkv_bias", (False,), False)
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim, bias=c.flag("attention_bias", False))
    mlp = MlpSpec(c.integer("intermediate_size"), "relu2", gated=False)
    layers = (LayerSpec(replace(heads, qk_norm="head"), mlp),) * c.integer("num_hidden_layers")
    cap = softcap(c, "final_logit_softcapping", 15.0)
    return model_spec(c, "nanochat", decoder(c, layers, final_softcap=cap), _RULES)

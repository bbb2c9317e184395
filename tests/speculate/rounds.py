"""A model that says one successor of each token, and heads that know it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.heads.made import written
from tests.models.stories import HIDDEN, VOCAB
from tests.speculate.eagle_reference import write

V, D = 50, 64
SHAPE = {"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "head_dim": 32,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip

STORIES: tuple[int, int] = HIDDEN, VOCAB
"""Width and ids of the embedded model, for heads of random weights beside it."""


def successor(tokens: Tensor) -> Tensor:
    """What follows each token: one round of all of them."""
    return (tokens * 3 + 7) % V


def after(steps: int) -> Tensor:
    """[V, D]: the matrix that turns a token's place into that of what comes so many later."""
    tokens = torch.arange(V)
    found = tokens
    for _ in range(steps):
        found = successor(found)
    matrix = torch.zeros(V, D)
    matrix[found, tokens] = 1
    return matrix


def target(folder: Path, layers: float, sure: float, num_layers: int = 3) -> Path:
    """A model that says each token's successor; its layers add something else."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=num_layers, max_position_embeddings=256, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.normal_(0, layers)
            layer.mlp.down_proj.weight.normal_(0, layers)
        model.model.embed_tokens.weight.copy_(torch.eye(V, D))
        model.lm_head.weight.zero_()
        model.lm_head.weight[successor(torch.arange(V)), torch.arange(V)] = sure
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def sure_heads(folder: Path, kind: str, heads: int = 4) -> Path:
    """Heads that know all that comes; kind: whose projection they have."""
    tensors = {}
    for k in range(heads):
        weight = torch.zeros(D, D)
        if kind == "target":  # to where the target's head looks for the token before
            weight[:V] = after(k + 1) * 4
        tensors |= {f"{k}.0.linear.weight": weight, f"{k}.0.linear.bias": torch.zeros(D)}
        if kind == "each":
            tensors[f"{k}.1.weight"] = after(k + 2) * 4
    return written(folder, tensors, {"medusa_num_heads": heads})


def sure_head(folder: Path, noise: float = 0.0) -> Path:
    """An EAGLE head whose feature is the token's embedding: it knows each successor."""
    torch.manual_seed(1)
    layer = "layers.0"
    tensors = {
        "fc.weight": torch.cat((8 * torch.eye(D), torch.zeros(D, D)), 1),
        **{f"{layer}.self_attn.{x}_proj.weight": torch.randn(64 if x == "q" else 32, D)
           for x in "qkv"},
        f"{layer}.self_attn.o_proj.weight": noise * torch.randn(D, 64),
        f"{layer}.mlp.gate_proj.weight": torch.randn(48, D),
        f"{layer}.mlp.up_proj.weight": torch.randn(48, D),
        f"{layer}.mlp.down_proj.weight": noise * torch.randn(D, 48),
        f"{layer}.post_attention_layernorm.weight": torch.ones(D),
    }  # fmt: skip
    return write(folder, {n: t.to(torch.bfloat16) for n, t in tensors.items()}, **SHAPE)

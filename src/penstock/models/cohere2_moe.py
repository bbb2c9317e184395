"""Cohere 2 with experts: both blocks read one norm's rows, and the first layers have no experts.

Source: transformers' `cohere2_moe`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.models.cohere import cohere_heads, cohere_model
from penstock.models.common import (
    EXPERT_RULES,
    decoder,
    experts,
    gated_mlp,
    layer_windows,
    mixed_blocks,
    shared_rules,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _half(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """A mean of two is a sum of halves."""
    return tensor * 0.5


_HALVED: tuple[Rule, ...] = (
    Rename(
        "model.layers.{i}.mlp.shared_experts.down_proj.{p}",
        "layers.{i}.mlp.shared.down.{p}",
        _half,
    ),
)


@register("Cohere2MoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Cohere 2 with experts."""
    c.assume(head_dim=128)
    c.get("output_router_logits")
    averages = c.only("shared_expert_combination_strategy", ("average", "sum"), "average")
    dense = gated_mlp(c)
    size = c.integer("prefix_dense_intermediate_size", dense.intermediate)
    first = replace(dense, intermediate=size)
    blocks = mixed_blocks(c, first, _mixed(c, dense, averages == "average"), 0)
    rules = (*shared_rules("shared_experts"), *EXPERT_RULES)
    if averages == "average":
        rules = (*_HALVED, *rules)
    norm = NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5))
    if c.has("rms_norm_eps"):
        norm = NormSpec(eps=c.number("rms_norm_eps"))
    layers = [
        LayerSpec(a, block, parallel=True, one_norm=True)
        for a, block in zip(_heads(c, [block is first for block in blocks]), blocks, strict=True)
    ]
    spec = decoder(c, layers, tied=True, norm=norm)
    return cohere_model(c, "cohere2_moe", spec, *rules)


def _heads(c: ConfigReader, dense: list[bool]) -> list[AttentionSpec]:
    """Each layer's attention. Layers that see all don't rotate, but for dense ones of a prefix
    whose own pattern is 1.
    """
    base, window = cohere_heads(c, 10_000.0), sliding_window(c, 4096)
    every, prefix = (
        c.integer("sliding_window_pattern", 4),
        c.integer("prefix_dense_sliding_window_pattern", 1),
    )
    first = c.get("first_k_dense_replace", 0)

    def slides(i: int) -> bool:
        return (i + 1) % prefix > 0 if i < first else (i - first + 1) % every > 0

    windows = layer_windows(c, len(dense), window, slides)
    return [
        replace(base, window=w, rope=base.rope if w or (plain and prefix == 1) else None)
        for w, plain in zip(windows, dense, strict=True)
    ]


def _mixed(c: ConfigReader, dense: MlpSpec, averages: bool) -> MlpSpec:
    """Experts, and perhaps a block beside them; averages: with whose result theirs is averaged."""
    sigmoid = c.only("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "sigmoid"
    normalize = c.flag("norm_topk_prob", True) or not sigmoid
    found = experts(c, 8, 2, "intermediate_size", normalize=normalize)
    shared = c.get("num_shared_experts", 0)
    if shared != 0:
        shared = c.integer("num_shared_experts") * dense.intermediate
    assert found.experts is not None
    own = replace(found.experts, sigmoid=sigmoid, shared=shared)
    return replace(found, experts=replace(own, scale=0.5 if shared and averages else 1.0))

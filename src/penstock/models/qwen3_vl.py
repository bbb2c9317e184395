"""Qwen3-VL, with experts or without: rows of the tower's middle go to the decoder's first layers,
too (DeepStack).

Source: Bai et al. 2025, arXiv:2511.21631; Meng et al. 2024, arXiv:2406.04334 (DeepStack).
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models import qwen3, qwen3_moe
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2_vl import TOWER_RULES, grid_of, together
from penstock.models.registry import register
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import GridSpec, MlpSpec, NormSpec

_AT = "visual.blocks.{i}"
TOWER: tuple[Rule, ...] = (
    *TOWER_RULES,
    Rename("visual.patch_embed.proj.bias", "vision.patches.bias"),
    Rename("visual.pos_embed.weight", "vision.positions.weight"),
    Rename(f"{_AT}.mlp.linear_fc1.{{p}}", "vision.layers.{i}.mlp.up.{p}"),
    Rename(f"{_AT}.mlp.linear_fc2.{{p}}", "vision.layers.{i}.mlp.down.{p}"),
    Rename("visual.merger.norm.{p}", "vision.post_norm.{p}"),
    Rename("visual.merger.linear_fc1.{p}", "vision.projector.up.{p}"),
    Rename("visual.merger.linear_fc2.{p}", "vision.projector.down.{p}"),
)
"""Names of the tower's tensors, but for what goes to first layers too."""

_DEEP: tuple[Rule, ...] = (
    Rename("visual.deepstack_merger_list.{i}.norm.{p}", "vision.deep.{i}.norm.{p}"),
    Rename("visual.deepstack_merger_list.{i}.linear_fc1.{p}", "vision.deep.{i}.projector.up.{p}"),
    Rename("visual.deepstack_merger_list.{i}.linear_fc2.{p}", "vision.deep.{i}.projector.down.{p}"),
)


def tower(part: ConfigReader, out: int) -> GridSpec:
    """The tower of a `vision_config`, before a decoder of hidden size `out`; without DeepStack."""
    part.assume(hidden_size=1152, intermediate_size=4304, depth=27, patch_size=16)
    part.only("out_hidden_size", (out,), out)
    act = activation(part, "hidden_act", "gelu_pytorch_tanh", gated=False)
    mlp = MlpSpec(part.integer("intermediate_size"), act, gated=False, bias=True)
    norm = NormSpec("layer", 1e-6, bias=True)
    grid = grid_of(part, part.integer("hidden_size"), mlp, norm, out)
    side = math.isqrt(part.integer("num_position_embeddings", 2304))
    part.only("num_position_embeddings", (side**2,), 2304)
    return replace(grid, patch_bias=True, table_side=side)


@register("Qwen3VLForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a dense Qwen3-VL."""
    return _seeing(c, qwen3.read_config(c.part("text_config")), "qwen3_vl")


@register("Qwen3VLMoeForConditionalGeneration")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """The same of one with experts."""
    part = c.part("text_config")
    part.assume(
        num_key_value_heads=16, max_position_embeddings=128_000, moe_intermediate_size=1408,
        intermediate_size=5632, num_experts_per_tok=4, norm_topk_prob=True,
    )  # fmt: skip
    if not part.has("num_local_experts"):
        part.assume(num_experts=60)
    part.only("norm_topk_prob", (True,), True)
    part.replace(tie_word_embeddings=c.flag("tie_word_embeddings", False))  # whatever it says
    return _seeing(c, qwen3_moe.read_config(part), "qwen3_vl_moe")


def _seeing(c: ConfigReader, text: ModelSpec, family: str) -> ModelSpec:
    part = c.part("vision_config")
    grid = tower(part, text.decoder.hidden)
    count, deep = len(grid.layers), part.get("deepstack_visual_indexes", [8, 16, 24])
    if (
        not isinstance(deep, list)
        or any(type(i) is not int or not 0 <= i < count for i in deep)
        or deep != sorted(set(deep))
        or len(deep) > len(text.decoder.layers)
    ):
        raise UnsupportedModelError(
            f"vision_config: deepstack_visual_indexes {deep!r} aren't layers of {count} in order, "
            f"for as many of the text model's {len(text.decoder.layers)}."
        )
    return together(c, text, replace(grid, deep=tuple(deep)), (*TOWER, *_DEEP), family)

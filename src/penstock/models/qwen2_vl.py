"""Qwen2-VL and Qwen2.5-VL: pictures of any size, before a Qwen2 whose tokens turn by three numbers.

Source: Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models import qwen2
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.spec import ModelSpec, PicturesSpec, Rename, Rule, Stack
from penstock.models.vision.towers import flat
from penstock.nn.spec import (
    AttentionSpec,
    GridSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ProjectorSpec,
    RopeSpec,
)

_AT = "visual.blocks.{i}"
TOWER_RULES: tuple[Rule, ...] = (
    Rename("visual.patch_embed.proj.weight", "vision.patches.weight", flat),
    Rename(f"{_AT}.attn.qkv.{{p}}", "vision.layers.{i}.attention.qkv.{p}"),
    Rename(f"{_AT}.attn.proj.{{p}}", "vision.layers.{i}.attention.out.{p}"),
    Rename(f"{_AT}.norm1.{{p}}", "vision.layers.{i}.attention_norm.{p}"),
    Rename(f"{_AT}.norm2.{{p}}", "vision.layers.{i}.mlp_norm.{p}"),
)
"""Names of all of Qwen's towers."""
_MERGER: tuple[Rule, ...] = (
    Rename("visual.merger.ln_q.{p}", "vision.post_norm.{p}"),
    Rename("visual.merger.mlp.0.{p}", "vision.projector.up.{p}"),
    Rename("visual.merger.mlp.2.{p}", "vision.projector.down.{p}"),
)
_PLAIN_MLP: tuple[Rule, ...] = (
    Rename(f"{_AT}.mlp.fc1.{{p}}", "vision.layers.{i}.mlp.up.{p}"),
    Rename(f"{_AT}.mlp.fc2.{{p}}", "vision.layers.{i}.mlp.down.{p}"),
)
_GATED_MLP: tuple[Rule, ...] = (
    Stack(
        (f"{_AT}.mlp.gate_proj.{{p}}", f"{_AT}.mlp.up_proj.{{p}}"), "vision.layers.{i}.mlp.up.{p}"
    ),
    Rename(f"{_AT}.mlp.down_proj.{{p}}", "vision.layers.{i}.mlp.down.{p}"),
)
_IGNORED = (
    "video_token_id",
    "vision_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Ids that templates write by their names."""


@register("Qwen2VLForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen2-VL."""
    part = c.part("vision_config")
    part.assume(embed_dim=1280, hidden_act="quick_gelu")
    hidden = part.integer("embed_dim")
    ratio = part.positive("mlp_ratio", 4)
    act = part.only("hidden_act", ("quick_gelu",), "quick_gelu")
    mlp = MlpSpec(int(hidden * ratio), act, gated=False, bias=True)
    text = _text(c)
    part.only("hidden_size", (text.decoder.hidden,), text.decoder.hidden)
    grid = grid_of(part, hidden, mlp, NormSpec("layer", 1e-6, bias=True), text.decoder.hidden)
    return together(c, text, grid, (*TOWER_RULES, *_MERGER, *_PLAIN_MLP), "qwen2_vl")


@register("Qwen2_5_VLForConditionalGeneration")
def read_config_2_5(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen2.5-VL."""
    part = c.part("vision_config")
    part.assume(hidden_size=3584, intermediate_size=3420)
    hidden = part.integer("hidden_size")
    mlp = MlpSpec(
        part.integer("intermediate_size"), activation(part, "hidden_act", "silu"), bias=True
    )
    text = _text(c)
    part.only("out_hidden_size", (text.decoder.hidden,), text.decoder.hidden)
    grid = grid_of(part, hidden, mlp, NormSpec("rms", 1e-6), text.decoder.hidden)
    unit = grid.patch * grid.projector.fold
    window, whole = (
        part.integer("window_size", 112),
        part.get("fullatt_block_indexes", [7, 15, 23, 31]),
    )
    if not isinstance(whole, list) or any(type(i) is not int for i in whole) or window < unit:
        raise UnsupportedModelError(
            f"vision_config: a window_size of {window} and fullatt_block_indexes {whole!r} "
            f"describe no windows of tokens of {unit} pixels."
        )
    part.get("tokens_per_second")  # of videos
    grid = replace(grid, window=window // unit, whole=tuple(whole))
    return together(c, text, grid, (*TOWER_RULES, *_MERGER, *_GATED_MLP), "qwen2_5_vl")


def _text(c: ConfigReader) -> ModelSpec:
    """The text model; published configs have its keys among their own."""
    if not c.has("text_config"):
        return qwen2.read_config(c)
    return qwen2.read_config(c.part("text_config"))


def grid_of(c: ConfigReader, hidden: int, mlp: MlpSpec, norm: NormSpec, out: int) -> GridSpec:
    """What the towers of Qwen's models have in common."""
    heads, fold = c.integer("num_heads", 16), c.integer("spatial_merge_size", 2)
    if hidden % (4 * heads):
        raise UnsupportedModelError(
            f"vision_config: {hidden} dimensions aren't those of num_heads {heads} that turn by "
            "rows and columns."
        )
    dim, patch = hidden // heads, c.integer("patch_size", 14)
    c.only("in_channels", (3,), c.get("in_chans", 3))
    c.only("spatial_patch_size", (patch,), patch)
    c.get("initializer_range")
    turning = c.nested("rope_parameters") or ConfigReader({})
    turning.only("rope_type", ("axial", "default"), "axial")
    theta = turning.positive("rope_theta", 10_000.0)
    attention = AttentionSpec(
        heads,
        heads,
        dim,
        dim**-0.5,
        RopeSpec(theta, dim),
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )
    return GridSpec(
        hidden,
        (LayerSpec(attention, mlp),) * c.integer("depth", 32),
        norm,
        patch,
        c.integer("temporal_patch_size", 2),
        theta,
        ProjectorSpec(out, hidden * fold**2, fold, bias=True, activation="gelu"),
    )


def together(
    c: ConfigReader,
    text: ModelSpec,
    grid: GridSpec,
    rules: tuple[Rule, ...],
    family: str,
    image_token_id: int = 151_655,
) -> ModelSpec:
    """A text model with a tower before it; image_token_id: the family's."""
    for key in _IGNORED:
        c.get(key)
    tied = c.flag("tie_word_embeddings", text.decoder.tied) or text.decoder.tied
    attend = [x.attention for x in text.decoder.layers if x.attention.delta is None]
    if any(a.rope is None or not a.rope.sections for a in attend):
        raise UnsupportedModelError(
            "config.json has no mrope_section in rope_scaling, by which tokens of pictures turn."
        )
    return replace(
        text,
        family=family,
        decoder=replace(text.decoder, vision=grid, tied=tied),
        rules=(*rules, *text.rules),
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
            ("language_model.model.", "model."),
            ("language_model.lm_head", "lm_head"),
        ),
        pictures=PicturesSpec(
            c.integer("image_token_id", image_token_id),
            "grid",
            ("<|vision_start|>", "<|vision_end|>"),
        ),
    )

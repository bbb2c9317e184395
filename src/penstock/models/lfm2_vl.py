"""LFM2-VL: SigLIP 2's tower over pictures of any shape, folded, before an LFM2.

Source: the models' cards and transformers' `lfm2_vl`; arXiv:2511.23404; the tower: Tschannen et al.
2025, arXiv:2502.14786.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import Ignore, ModelSpec, PicturesSpec, Rename, Rule
from penstock.models.vision.towers import layer_rules, tower_layers
from penstock.nn.spec import DecoderSpec, GridSpec, NormSpec, ProjectorSpec

_AT = "vision_tower"
_RULES: tuple[Rule, ...] = (
    Rename(f"{_AT}.embeddings.patch_embedding.bias", "vision.patches.bias"),
    Rename(f"{_AT}.embeddings.position_embedding.weight", "vision.positions.weight"),
    Rename(f"{_AT}.post_layernorm.{{p}}", "vision.post_norm.{p}"),
    *layer_rules(_AT),
    Rename("multi_modal_projector.linear_1.{p}", "vision.projector.up.{p}"),
    Rename("multi_modal_projector.linear_2.{p}", "vision.projector.down.{p}"),
)
_NORM = "multi_modal_projector.layer_norm"
_CUTTING = """do_image_splitting encoder_patch_size max_image_tokens max_num_patches
    max_pixels_tolerance max_tiles min_image_tokens min_tiles tile_size use_thumbnail""".split()
"""Of published configs: what the processor's own file says."""


@register("Lfm2VlForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an LFM2-VL."""
    text = read_part(c, "text_config", ("lfm2", "lfm2_moe"))
    for key in _CUTTING:
        c.get(key)
    c.only("use_image_special_tokens", (True,), True)
    c.only("vision_feature_layer", (-1,), -1)  # published files leave out what isn't computed
    norm = NormSpec("layer", 1e-5, bias=True)
    projector = ProjectorSpec(
        text.decoder.hidden,
        c.integer("projector_hidden_size", 2560),
        c.integer("downsample_factor", 2),
        bias=c.flag("projector_bias", True),
        activation=activation(c, "projector_hidden_act", "gelu", gated=False),
        norm=norm if c.flag("projector_use_layernorm", True) else None,
    )
    normed: Rule = Rename(f"{_NORM}.{{p}}", "vision.projector.norm.{p}")
    if projector.norm is None:
        normed = Ignore(f"{_NORM}.*")
    grid = _tower(c.part("vision_config"), projector)
    own = "tie_embedding" if c.has("tie_embedding") else "tie_word_embeddings"
    token_id = c.integer("image_token_id", c.integer("image_token_index", 396))
    c.only("image_token_index", (token_id,), token_id)  # as older files call it
    return replace(
        text,
        family="lfm2_vl",
        decoder=replace(text.decoder, vision=grid, tied=c.flag(own, True)),
        rules=(_patches(grid.patch), normed, *_RULES, *text.rules),
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("model.vision_tower.", "vision_tower."),
            ("vision_tower.vision_model.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        pictures=PicturesSpec(token_id, "pieces"),
    )


def _tower(c: ConfigReader, projector: ProjectorSpec) -> GridSpec:
    c.only("model_type", ("siglip2_vision_model",), "siglip2_vision_model")
    c.get("vision_use_head")  # stands behind the layers
    hidden, layers = tower_layers(c, clip=False)
    side = math.isqrt(c.integer("num_patches", 256))
    if side**2 != c.integer("num_patches", 256):
        raise UnsupportedModelError(
            f"vision_config: num_patches {c.integer('num_patches')} aren't those of a square, of "
            "which the table of positions is."
        )
    return GridSpec(
        hidden,
        layers,
        NormSpec("layer", c.number("layer_norm_eps", 1e-6), bias=True),
        c.integer("patch_size", 16),
        frames=1,
        theta=0.0,
        projector=projector,
        patch_bias=True,
        table_side=side,
        by_area=True,
    )


def _patches(patch: int) -> Rename:
    """The matrix that multiplies a patch: files have its colours last, here they come first."""

    def colours_first(weight: Tensor, spec: DecoderSpec) -> Tensor:
        return weight.view(-1, patch**2, 3).transpose(1, 2).flatten(1)

    name = f"{_AT}.embeddings.patch_embedding.weight"
    return Rename(name, "vision.patches.weight", colours_first)

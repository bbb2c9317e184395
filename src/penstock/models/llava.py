"""LLaVA 1.5 and LLaVA-NeXT (1.6): a CLIP or SigLIP tower and two matrices before a text model.

Source: Liu et al. 2023, arXiv:2310.03744; the second's: Liu et al. 2024, "LLaVA-NeXT: Improved
reasoning, OCR, and world knowledge", and transformers' `llava_next`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import ModelSpec, PicturesSpec, Rename
from penstock.models.vision.towers import tower, tower_rules
from penstock.nn.spec import DecoderSpec, ProjectorSpec, VisionSpec

_TEXT = ("llama", "mistral", "qwen2")
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
"""Of transformers' LlamaConfig: published configs leave out what is like it."""
_UNSAID: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14_336},
}
_SHAPES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@register("LlavaForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a LLaVA whose tower's one layer is read."""
    return _read(c)


@register("LlavaNextForConditionalGeneration")
def read_next_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a LLaVA-NeXT."""
    c.only("use_image_newline_parameter", (True,), True)
    spec = _read(c)
    assert isinstance(spec.decoder.vision, VisionSpec) and spec.pictures is not None
    vision = replace(spec.decoder.vision, ends_lines=True)
    if vision.keeps_class:
        raise UnsupportedModelError(
            "config.json: vision_feature_select_strategy 'full' gives tiles a row that isn't a "
            "patch's, which has no place in a picture's lines. Say 'default'."
        )
    side, shapes = vision.image_size, c.get("image_grid_pinpoints", _SHAPES)
    if not _are_shapes(shapes, side):
        raise UnsupportedModelError(
            f"config.json: image_grid_pinpoints {shapes!r:.80} aren't heights and widths that are "
            f"multiples of the tower's {side} pixels."
        )
    return replace(
        spec,
        family="llava_next",
        decoder=replace(spec.decoder, vision=vision),
        rules=(Rename("image_newline", "vision.line_end.weight", _row), *spec.rules),
        aliases=(("model.image_newline", "image_newline"), *spec.aliases),
        pictures=replace(spec.pictures, cut="anyres", shapes=tuple(map(tuple, shapes))),
    )


def _are_shapes(shapes: Any, side: int) -> bool:
    return (
        isinstance(shapes, list)
        and len(shapes) > 0
        and all(isinstance(shape, list) and len(shape) == 2 for shape in shapes)
        and all(type(x) is int and x > 0 and x % side == 0 for shape in shapes for x in shape)
    )


def _row(weight: Tensor, spec: DecoderSpec) -> Tensor:
    return weight.unsqueeze(0)


def _read(c: ConfigReader) -> ModelSpec:
    for key in ("ignore_index", "vocab_size"):  # of training, and the text model's own
        c.get(key)
    kind = (c.get("text_config") or {}).get("model_type", "llama")
    text = read_part(c, "text_config", _TEXT, **_UNSAID.get(kind, {}))
    projector = ProjectorSpec(
        text.decoder.hidden,
        bias=c.flag("multimodal_projector_bias", True),
        activation=activation(c, "projector_hidden_act", "gelu"),
    )
    part = c.part("vision_config")
    clip = part.only(
        "model_type", ("clip_vision_model", "siglip_vision_model"), "clip_vision_model"
    )
    layer = c.get("vision_feature_layer", -2)
    if type(layer) is not int or layer == 0:
        raise UnsupportedModelError(
            f"config.json: vision_feature_layer must be one layer's number, not {layer!r}: "
            "features of several layers aren't built."
        )
    vision = tower(part, projector, clip=clip == "clip_vision_model", layers=layer)
    keeps = c.only("vision_feature_select_strategy", ("default", "full"), "default") == "full"
    if not keeps and not vision.class_token:
        raise UnsupportedModelError(
            "config.json: vision_feature_select_strategy 'default' leaves the first row out, which "
            "in this tower is a patch. Say 'full'."
        )
    vision = replace(vision, keeps_class=keeps and vision.class_token)
    c.get("image_seq_length")  # follows from the tower
    total = part.integer("num_hidden_layers", 12)
    both = ("linear_1", "up"), ("linear_2", "down")
    rules = (
        *tower_rules(vision, total, "vision_tower"),
        *(
            Rename(f"multi_modal_projector.{a}.{{p}}", f"vision.projector.{b}.{{p}}")
            for a, b in both
        ),
        *text.rules,
    )
    tied = c.flag("tie_word_embeddings", text.decoder.tied) or text.decoder.tied
    return replace(
        text,
        family="llava",
        decoder=replace(text.decoder, vision=vision, tied=tied),
        rules=rules,
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.", ""),
            ("model.vision_tower.", "vision_tower."),
            ("vision_tower.vision_model.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        pictures=PicturesSpec(_token(c), "whole"),
    )


def _token(c: ConfigReader) -> int:
    """Under either of its names."""
    return c.integer("image_token_index", c.integer("image_token_id", 32_000))

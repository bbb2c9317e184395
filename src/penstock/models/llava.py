"""LLaVA 1.5: a CLIP or SigLIP tower and two matrices before a text model.

Source: Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import ModelSpec, PicturesSpec, Rename
from penstock.models.vision.towers import tower, tower_rules
from penstock.nn.spec import ProjectorSpec

_TEXT = ("llama", "mistral", "qwen2")
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
"""Of transformers' LlamaConfig: published configs leave out what is like it."""


@register("LlavaForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a LLaVA whose tower's one layer is read."""
    for key in ("ignore_index", "vocab_size"):  # of training, and the text model's own
        c.get(key)
    kind = (c.get("text_config") or {}).get("model_type", "llama")
    defaults: dict[str, Any] = _LLAMA if kind == "llama" else {}
    text = read_part(c, "text_config", _TEXT, **defaults)
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

"""Idefics3 and SmolVLM: SigLIP's tower over tiles of a picture, folded, before a Llama.

Source: Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025, arXiv:2504.05299.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import ModelSpec, PicturesSpec, Rename
from penstock.models.vision.towers import tower, tower_rules
from penstock.nn.spec import ProjectorSpec

_UNUSED = ("perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha", "resampler_config")
"""Of text configs: what earlier designs of the family had."""


@register("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an Idefics3 or a SmolVLM."""
    text = read_part(c, "text_config", ("llama",), unused=_UNUSED, rms_norm_eps=1e-5)
    part = c.part("vision_config")
    part.assume(hidden_size=1152, num_attention_heads=16, patch_size=32)
    part.only("use_base_siglip", (True, False), False)
    for key in ("size", "max_image_size", "tie_word_embeddings"):
        part.get(key)  # pictures are cut as the processor says
    c.get("_pad_token_id")
    projector = ProjectorSpec(text.decoder.hidden, fold=c.integer("scale_factor", 2))
    vision = replace(tower(part, projector, clip=False), by_fractions=True)
    tied = c.flag("tie_word_embeddings", text.decoder.tied)
    rules = (
        *tower_rules(vision, len(vision.layers), "vision_model"),
        Rename("connector.modality_projection.proj.weight", "vision.projector.up.weight"),
        *text.rules,
    )
    return replace(
        text,
        family="idefics3",
        decoder=replace(text.decoder, vision=vision, tied=tied),
        rules=rules,
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.text_model.", "model."),
            ("model.vision_model.", "vision_model."),
            ("model.connector.", "connector."),
        ),
        pictures=PicturesSpec(c.integer("image_token_id", 128_257), "tiles"),
    )

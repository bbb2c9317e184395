"""Gemma 3: five local layers to a global one, each kind with a rope of its own; before it, in most
sizes, SigLIP's tower, whose rows are averaged, and see each other both ways in the decoder.

Source: Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.config import PROMPT_LOGITS
from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
    softcap,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.rope import layer_ropes
from penstock.models.spec import ModelSpec, PicturesSpec, Rename
from penstock.models.vision.towers import tower, tower_rules
from penstock.nn.spec import DecoderSpec, LayerSpec, NormSpec, ProjectorSpec

_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Of transformers' Gemma3TextConfig: published configs leave out what is like it."""


@register("Gemma3ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 3 without its vision tower."""
    c.assume(num_key_value_heads=4, max_position_embeddings=131_072)
    dim = head_dim(c, 256)
    local_rope, global_rope = layer_ropes(
        c,
        dim,
        local_theta=c.number("rope_local_base_freq", 10_000.0),
        global_theta=c.number("rope_theta", 1_000_000.0),
    )
    base = attention(
        c,
        global_rope,
        dim,
        scale=c.positive("query_pre_attn_scalar", 256) ** -0.5,
        bias=c.flag("attention_bias", False),
    )
    base = replace(base, qk_norm="head")
    cap = softcap(c, "attn_logit_softcapping", None)
    if cap:
        warnings.warn(
            f"config.json gives Gemma 3 attn_logit_softcapping={cap}, which isn't applied, as in "
            "transformers. Set it to null to leave this warning out.",
            UserWarning,
            stacklevel=3,
        )
    mlp = gated_mlp(c, "hidden_activation", "gelu_pytorch_tanh")
    every = c.integer("sliding_window_pattern", 6)
    c.get("_sliding_window_pattern")  # written by transformers, which doesn't read it again
    windows = layer_windows(
        c, c.integer("num_hidden_layers"), sliding_window(c, 4096), lambda i: (i + 1) % every > 0
    )
    attentions = [replace(base, window=w, rope=local_rope if w else global_rope) for w in windows]
    spec = decoder(
        c,
        [LayerSpec(a, mlp, post_norm=True) for a in attentions],
        tied=True,
        offset=1.0,
        embed_scale=math.sqrt(c.integer("hidden_size")),
        final_softcap=softcap(c, "final_logit_softcapping", None),
    )
    return model_spec(c, "gemma3", spec, (*QK_NORM_RULES, *SANDWICH_RULES, *DENSE_RULES))


@register("Gemma3ForConditionalGeneration")
def read_seeing_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 3 with its vision tower."""
    stops = c.get("eos_token_id", 1)
    text = read_part(c, "text_config", ("gemma3_text",), eos_token_id=stops, **_TEXT)
    part = c.part("vision_config")
    part.only("model_type", ("siglip_vision_model",), "siglip_vision_model")
    count = c.integer("mm_tokens_per_image", 256)
    projector = ProjectorSpec(
        text.decoder.hidden,
        fold=_pooled(part, count),
        pools=True,
        norm=NormSpec("rms", part.number("layer_norm_eps", 1e-6), offset=1.0),
    )
    vision = tower(part, projector, clip=False)
    at, ours = "multi_modal_projector", "vision.projector"
    rules = (
        *tower_rules(vision, len(vision.layers), "vision_tower"),
        Rename(f"{at}.mm_input_projection_weight", f"{ours}.up.weight", _turned),
        Rename(f"{at}.mm_soft_emb_norm.weight", f"{ours}.norm.weight"),
        *text.rules,
    )
    marks = c.integer("boi_token_index", 255_999), c.integer("eoi_token_index", 256_000)
    token_id = c.integer("image_token_index", c.integer("image_token_id", 262_144))
    return replace(
        text,
        decoder=replace(text.decoder, vision=vision, tied=c.flag("tie_word_embeddings", True)),
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
        pictures=PicturesSpec(token_id, "framed", marks=marks, both_ways=True),
    )


def _pooled(vision: ConfigReader, count: int) -> int:
    """Patches of a side that become one of `count` tokens."""
    side, tokens = vision.integer("image_size", 224), math.isqrt(count)
    side //= vision.integer("patch_size", 16)
    if tokens**2 != count or side % tokens or count > PROMPT_LOGITS:
        raise UnsupportedModelError(
            f"config.json: mm_tokens_per_image {count} must be a square, of a side that divides "
            f"the {side} patches of the tower's, and at most {PROMPT_LOGITS}."
        )
    return side // tokens


def _turned(weight: Tensor, spec: DecoderSpec) -> Tensor:
    """[tower's, decoder's] → the other way round."""
    return weight.t().contiguous()

"""InternVL in transformers' form: InternViT over tiles of a picture, folded, before a text model.

Source: Chen et al. 2023, arXiv:2312.14238; Zhu et al. 2025, arXiv:2504.10479 (InternVL3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import Ignore, ModelSpec, PicturesSpec, Rename, Rule, Stack
from penstock.models.vision.towers import flat
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ProjectorSpec,
    VisionSpec,
)

_TEXT = ("qwen2", "qwen3", "llama")
_AT = "vision_tower.encoder.layer.{i}"
_EACH = {
    "attention.projection_layer": "attention.out",
    "layernorm_before": "attention_norm",
    "layernorm_after": "mlp_norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


@register("InternVLForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an InternVL whose tower has layer norms (300M)."""
    text = read_part(c, "text_config", _TEXT)
    tied = bool((c.get("text_config") or {}).get("tie_word_embeddings", True))
    projector = ProjectorSpec(
        text.decoder.hidden,
        fold=_fold(c.number("downsample_ratio", 0.5)),
        bias=True,
        activation=activation(c, "projector_hidden_act", "gelu"),
        norm=NormSpec("layer", 1e-5, bias=True),
    )
    c.only("vision_feature_layer", (-1,), -1)
    c.only("vision_feature_select_strategy", ("default",), "default")
    c.get("image_seq_length")  # follows from the tower
    vision = _tower(c.part("vision_config"), projector)
    return replace(
        text,
        family="internvl",
        decoder=replace(text.decoder, vision=vision, tied=c.flag("tie_word_embeddings", tied)),
        rules=(*_rules(vision), *text.rules),
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.", ""),
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        pictures=PicturesSpec(c.integer("image_token_id", 151_667), "canvas"),
    )


def _tower(c: ConfigReader, projector: ProjectorSpec) -> VisionSpec:
    for key in ("layer_scale_init_value", "use_mask_token", "projection_dropout"):
        c.get(key)  # of training
    c.only("use_qk_norm", (False,), False)
    c.only("norm_type", ("layer_norm",), "layer_norm")
    c.only("use_absolute_position_embeddings", (True,), True)
    c.only("num_channels", (3,), 3)
    hidden, heads = c.integer("hidden_size", 1024), c.integer("num_attention_heads", 16)
    size, patch = _side(c, "image_size", 448), _side(c, "patch_size", 14)
    if hidden % heads or size < patch or size // patch % projector.fold:
        raise UnsupportedModelError(
            f"vision_config: hidden_size {hidden} in {heads} heads, or image_size {size} in "
            f"patches of {patch}, folded by {projector.fold}, don't come out even."
        )
    dim = hidden // heads
    bias = c.flag("attention_bias", False)
    attention = AttentionSpec(
        heads, heads, dim, dim**-0.5, None, qkv_bias=bias, out_bias=True, causal=False
    )
    kind = activation(c, "hidden_act", "gelu", gated=False)
    mlp = MlpSpec(c.integer("intermediate_size", 4096), kind, gated=False, bias=True)
    return VisionSpec(
        hidden,
        (LayerSpec(attention, mlp, scaled=True),) * c.integer("num_hidden_layers", 24),
        NormSpec("layer", c.number("layer_norm_eps", 1e-6), bias=True),
        size,
        patch,
        projector,
        class_token=True,
        post_norm=not c.flag("use_mean_pooling", True),
    )


def _side(c: ConfigReader, key: str, default: int) -> int:
    """Of a square, said once or for both sides."""
    found: Any = c.get(key, default)
    sides = found if isinstance(found, list) else [found]
    if not sides or any(type(x) is not int or x < 1 or x != sides[0] for x in sides):
        raise UnsupportedModelError(f"vision_config: {key} must be a square's, not {found!r:.80}.")
    return int(sides[0])


def _fold(ratio: float) -> int:
    fold = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not fold or abs(fold * ratio - 1) > 1e-6:
        raise UnsupportedModelError(
            f"config.json: downsample_ratio {ratio} isn't one over a whole number."
        )
    return fold


def _rules(vision: VisionSpec) -> tuple[Rule, ...]:
    at = "vision_tower.embeddings"
    rules: list[Rule] = [
        Rename(f"{at}.cls_token", "vision.first.weight", _table),
        Rename(f"{at}.position_embeddings", "vision.positions.weight", _table),
        Rename(f"{at}.patch_embeddings.projection.weight", "vision.patches.weight", flat),
        Rename(f"{at}.patch_embeddings.projection.bias", "vision.patches.bias"),
        Ignore(f"{at}.mask_token"),
        Stack(
            tuple(f"{_AT}.attention.{x}_proj.{{p}}" for x in "qkv"),
            "vision.layers.{i}.attention.qkv.{p}",
        ),
        Rename(f"{_AT}.lambda_1", "vision.layers.{i}.attention_post_norm.weight"),
        Rename(f"{_AT}.lambda_2", "vision.layers.{i}.mlp_post_norm.weight"),
        Rename("multi_modal_projector.layer_norm.{p}", "vision.projector.norm.{p}"),
        Rename("multi_modal_projector.linear_1.{p}", "vision.projector.up.{p}"),
        Rename("multi_modal_projector.linear_2.{p}", "vision.projector.down.{p}"),
    ]
    rules += (
        Rename(f"{_AT}.{theirs}.{{p}}", f"vision.layers.{{i}}.{ours}.{{p}}")
        for theirs, ours in _EACH.items()
    )
    if vision.post_norm:
        rules.append(Rename("vision_tower.layernorm.{p}", "vision.post_norm.{p}"))
    else:
        rules.append(Ignore("vision_tower.layernorm.*"))
    return tuple(rules)


def _table(weight: Tensor, spec: DecoderSpec) -> Tensor:
    """[1, n, D] → [n, D]."""
    return weight.squeeze(0)

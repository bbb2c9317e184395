"""Mistral 3: Pixtral's tower over pictures of any size, whose patches are merged, before a Mistral
or a Ministral 3.

Source: Agrawal et al. 2024, arXiv:2410.07073 (Pixtral); the models' cards.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.spec import ModelSpec, PicturesSpec, Rename, Rule, Stack
from penstock.models.vision.towers import flat
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    GridSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ProjectorSpec,
    RopeSpec,
)

_AT, _OURS = "vision_tower.transformer.layers.{i}", "vision.layers.{i}"
_BESIDE = "multi_modal_projector"
_RULES: tuple[Rule, ...] = (
    Rename("vision_tower.patch_conv.weight", "vision.patches.weight", flat),
    Rename("vision_tower.ln_pre.weight", "vision.pre_norm.weight"),
    Stack(
        tuple(f"{_AT}.attention.{x}_proj.weight" for x in "qkv"), f"{_OURS}.attention.qkv.weight"
    ),
    Rename(f"{_AT}.attention.o_proj.weight", f"{_OURS}.attention.out.weight"),
    Rename(f"{_AT}.attention_norm.weight", f"{_OURS}.attention_norm.weight"),
    Stack(
        (f"{_AT}.feed_forward.gate_proj.weight", f"{_AT}.feed_forward.up_proj.weight"),
        f"{_OURS}.mlp.up.weight",
    ),
    Rename(f"{_AT}.feed_forward.down_proj.weight", f"{_OURS}.mlp.down.weight"),
    Rename(f"{_AT}.ffn_norm.weight", f"{_OURS}.mlp_norm.weight"),
    Rename(f"{_BESIDE}.norm.weight", "vision.post_norm.weight"),
    Rename(f"{_BESIDE}.linear_1.{{p}}", "vision.projector.up.{p}"),
    Rename(f"{_BESIDE}.linear_2.{{p}}", "vision.projector.down.{p}"),
)


@register("Mistral3ForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Mistral Small 3.1 or later, or of a Ministral 3 that sees."""
    text = read_part(c, "text_config", ("mistral", "ministral3"))
    c.only("vision_feature_layer", (-1,), -1)
    projector = ProjectorSpec(
        text.decoder.hidden,
        fold=c.integer("spatial_merge_size", 2),
        merges=True,
        bias=c.flag("multimodal_projector_bias", False),
        activation=activation(c, "projector_hidden_act", "gelu"),
    )
    grid = _tower(c.part("vision_config"), projector, text.decoder.norm)
    return replace(
        text,
        family="mistral3",
        decoder=replace(
            text.decoder, vision=grid, tied=c.flag("tie_word_embeddings", text.decoder.tied)
        ),
        rules=(_merging(projector.fold), *_RULES, *text.rules),
        dtype=c.dtype or text.dtype,
        aliases=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.", ""),
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        pictures=PicturesSpec(
            c.integer("image_token_index", c.integer("image_token_id", 10)), "lines"
        ),
    )


def _tower(c: ConfigReader, projector: ProjectorSpec, last: NormSpec) -> GridSpec:
    c.only("model_type", ("pixtral",), "pixtral")
    c.only("num_channels", (3,), 3)
    c.get("image_size")  # pictures are cut as the processor says
    c.get("vocab_size")
    hidden, heads = c.integer("hidden_size", 1024), c.integer("num_attention_heads", 16)
    dim = hidden // heads
    if hidden % (4 * heads):
        raise UnsupportedModelError(
            f"vision_config: {hidden} dimensions aren't those of num_attention_heads {heads} that "
            "turn by rows and columns."
        )
    c.only("head_dim", (dim,), dim)
    turning = c.nested("rope_parameters") or ConfigReader({})
    turning.only("rope_type", ("axial", "default"), "axial")
    theta = turning.positive("rope_theta", c.positive("rope_theta", 10_000.0))
    attention = AttentionSpec(heads, heads, dim, dim**-0.5, RopeSpec(theta, dim), causal=False)
    mlp = MlpSpec(c.integer("intermediate_size", 4096), activation(c, "hidden_act", "gelu"))
    return GridSpec(
        hidden,
        (LayerSpec(attention, mlp),) * c.integer("num_hidden_layers", 24),
        NormSpec("rms", 1e-5),
        c.integer("patch_size", 16),
        frames=1,
        theta=theta,
        projector=projector,
        in_turns=True,
        pre_norm=True,
        last_norm=NormSpec("rms", last.eps),
    )


def _merging(fold: int) -> Rename:
    """The matrix that merges patches: files have a dimension of all patches side by side, here a
    patch has all of its own.
    """

    def patches_first(weight: Tensor, spec: DecoderSpec) -> Tensor:
        return weight.view(len(weight), -1, fold**2).transpose(1, 2).flatten(1)

    name = f"{_BESIDE}.patch_merger.merging_layer.weight"
    return Rename(name, "vision.projector.merge.weight", patches_first)

"""Vision towers as configs describe them: CLIP's and SigLIP's, by `model_type`.

Source: Radford et al. 2021, arXiv:2103.00020 (CLIP); Zhai et al. 2023, arXiv:2303.15343 (SigLIP).
"""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.spec import Ignore, Rename, Rule, Stack
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ProjectorSpec,
    VisionSpec,
)

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def tower(c: ConfigReader, projector: ProjectorSpec, *, clip: bool, layers: int = 0) -> VisionSpec:
    """A tower in the usual names. clip: with CLIP's class token and first norm.

    layers: the last one that is computed, counted from 1, or from the end where negative; 0: all,
    and the norm after them.
    """
    for key in (
        "initializer_factor",
        "projection_dim",
        "vision_use_head",
        "num_image_tokens",
        "vocab_size",
    ):
        c.get(key)  # of training, of texts, or of what stands behind the layers
    hidden, each = tower_layers(c, clip=clip)
    size = c.integer("image_size", 224)
    patch = c.integer("patch_size", 32 if clip else 16)
    if size < patch or size // patch % projector.fold:
        raise UnsupportedModelError(
            f"vision_config: image_size {size} has {size // patch} patches of {patch} a side, "
            f"which scale_factor {projector.fold} doesn't divide."
        )
    return VisionSpec(
        hidden,
        each[: _computed(layers, len(each))],
        NormSpec("layer", c.number("layer_norm_eps", 1e-5 if clip else 1e-6), bias=True),
        size,
        patch,
        projector,
        patch_bias=not clip,
        class_token=clip,
        pre_norm=clip,
        post_norm=layers == 0,
    )


def tower_layers(c: ConfigReader, *, clip: bool) -> tuple[int, tuple[LayerSpec, ...]]:
    """(hidden size, all layers) of a `vision_config` in the usual names."""
    c.only("num_channels", (3,), 3)
    hidden, heads = c.integer("hidden_size", 768), c.integer("num_attention_heads", 12)
    if hidden % heads:
        raise UnsupportedModelError(
            f"vision_config: hidden_size {hidden} isn't a multiple of num_attention_heads {heads}."
        )
    dim, count = hidden // heads, c.integer("num_hidden_layers", 12)
    attention = AttentionSpec(
        heads, heads, dim, dim**-0.5, None, qkv_bias=True, out_bias=True, causal=False
    )
    act = c.only("hidden_act", tuple(_ACTIVATIONS), "quick_gelu" if clip else "gelu_pytorch_tanh")
    kind = cast(Literal["gelu", "gelu_tanh", "quick_gelu"], _ACTIVATIONS[act])
    mlp = MlpSpec(c.integer("intermediate_size", 3072), kind, gated=False, bias=True)
    return hidden, (LayerSpec(attention, mlp),) * count


def _computed(layers: int, count: int) -> int:
    """How many layers are computed of `count`."""
    found = layers if layers > 0 else count + layers + (layers < 0)
    if not 0 < found <= count:
        raise UnsupportedModelError(
            f"config.json: vision_feature_layer {layers} isn't one of the {count} layers."
        )
    return found


def tower_rules(spec: VisionSpec, total: int, at: str) -> tuple[Rule, ...]:
    """A tower's names, below `at`. total: of its layers, of which not all may be computed."""
    rules: list[Rule] = [
        Rename(f"{at}.embeddings.patch_embedding.weight", "vision.patches.weight", flat),
        Rename(f"{at}.embeddings.position_embedding.weight", "vision.positions.weight"),
        Ignore(f"{at}.embeddings.position_ids"),
        *layer_rules(at),
    ]
    rules += (Ignore(f"{at}.encoder.layers.{i}.*") for i in range(len(spec.layers), total))
    if spec.patch_bias:
        rules.append(Rename(f"{at}.embeddings.patch_embedding.bias", "vision.patches.bias"))
    if spec.class_token:
        rules.append(Rename(f"{at}.embeddings.class_embedding", "vision.first.weight", _row))
        rules.append(Rename(f"{at}.pre_layrnorm.{{p}}", "vision.pre_norm.{p}"))
    if spec.post_norm:
        rules.append(Rename(f"{at}.post_layernorm.{{p}}", "vision.post_norm.{p}"))
    else:
        rules.append(Ignore(f"{at}.post_layernorm.*"))
    return tuple(rules)


def layer_rules(at: str) -> tuple[Rule, ...]:
    """The names of a tower's layers, below `at`."""
    layer = f"{at}.encoder.layers.{{i}}"
    each = {
        "self_attn.out_proj": "attention.out",
        "layer_norm1": "attention_norm",
        "layer_norm2": "mlp_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    return (
        Stack(
            tuple(f"{layer}.self_attn.{x}_proj.{{p}}" for x in "qkv"),
            "vision.layers.{i}.attention.qkv.{p}",
        ),
        *(
            Rename(f"{layer}.{theirs}.{{p}}", f"vision.layers.{{i}}.{ours}.{{p}}")
            for theirs, ours in each.items()
        ),
        Ignore(f"{at}.head.*"),
    )


def flat(weight: Tensor, spec: DecoderSpec) -> Tensor:
    """A convolution's weight [D, 3, p, p] as the matrix that multiplies a patch."""
    return weight.flatten(1)


def _row(weight: Tensor, spec: DecoderSpec) -> Tensor:
    return weight.unsqueeze(0)

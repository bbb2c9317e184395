"""Types of projectors (`mmproj` files): what config.json and a processor's file would say of each.

Names and values are those of llama.cpp's converters and of its tools/mtmd
(github.com/ggml-org/llama.cpp), which says what a file doesn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.gguf.parts import Config
from penstock.models.gguf.projector_facts import Facts
from penstock.models.gguf.rope import share_of

_QWEN_TOKENS = (8, 4096)
"""Of a picture, at least and at most, where a file doesn't say: llama.cpp's."""
_WINDOW = 112
"""Pixels of a window's side of Qwen2.5-VL, where a file doesn't say."""
_AVERAGED = 4
"""Patches of a side that are one row of Gemma 3's, where a file doesn't say."""
_TILES = 4
"""A picture's longer edge over a tile's, where a file of SmolVLM's doesn't say."""


Read = Callable[[Facts], Config]


@dataclass(frozen=True, slots=True)
class ProjectorType:
    """One value of `clip.projector_type`."""

    families: dict[str, str]  # `general.architecture` of language models → the whole's name
    tokens: tuple[str, ...]  # the first that there is is what rows of a picture take the places of
    names: dict[str, str]  # a tensor's stem → its name in a checkpoint, {i} for the layer
    last: str  # the matrix that gives rows as wide as the language model's
    read_config: Read  # of the whole, but for the text model
    processor: Read  # what a processor's file would say
    changed: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # back to what a
    # checkpoint has, by the name there
    marks: tuple[str, str] | None = None  # tokens before a picture's rows and after them
    turned: bool = False  # `last` is as wide as the language model in its columns


def _idefics3(f: Facts) -> Config:
    vision = f.sizes() | {
        "model_type": "idefics3_vision",
        "image_size": f.integer("image_size"),
        "hidden_act": f.activation("gelu_pytorch_tanh"),
    }
    return {"vision_config": vision, "scale_factor": f.integer("projector.scale_factor")}


def _idefics3_processor(f: Facts) -> Config:
    side = f.integer("image_size")
    longest = f.integer("preproc_image_size", _TILES * side)
    return f.colours() | {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": side},
    }


def _llava(f: Facts) -> Config:
    """Towers without a class token are SigLIP's, whose GELU no flag of their files means."""
    if f.m.get("clip.vision.image_grid_pinpoints") or "model.image_newline" in f.c.tensors:
        raise UnsupportedModelError(
            f"{f.c.path} is of a LLaVA 1.6, which cuts pictures into tiles of its own "
            "(clip.vision.image_grid_pinpoints): it isn't built; LLaVA 1.5 is."
        )
    f.m.get("clip.vision.mm_patch_merge_type")
    clip = _has_class(f)
    layers = f.m.get("clip.vision.feature_layer", [f.layers])
    if layers != [f.layers]:
        raise f.m.fail("clip.vision.feature_layer", layers, "one layer, the last that there is")
    act = f.activation("gelu")
    vision = f.sizes() | {
        "model_type": "clip_vision_model" if clip else "siglip_vision_model",
        "image_size": f.integer("image_size"),
        "hidden_act": act if clip else "gelu_pytorch_tanh",
    }
    return {
        "vision_config": vision,
        "vision_feature_layer": vision["num_hidden_layers"],
        "vision_feature_select_strategy": "default" if clip else "full",
        "multimodal_projector_bias": "mm.0.bias" in f.c.tensors,
    }


def _llava_processor(f: Facts) -> Config:
    """A picture is padded to a square, as in llava.cpp and in LLaVA 1.5 itself."""
    side = f.integer("image_size")
    both = {"height": side, "width": side}
    found = f.colours() | {"do_pad": True, "do_center_crop": _has_class(f), "size": both}
    if _has_class(f):
        found |= {"size": {"shortest_edge": side}, "crop_size": both}
    return found


def _has_class(f: Facts) -> bool:
    return "v.class_embd" in f.c.tensors


def _gemma3(f: Facts) -> Config:
    vision = f.sizes() | {
        "model_type": "siglip_vision_model",
        "image_size": f.integer("image_size"),
        "hidden_act": f.activation("gelu_pytorch_tanh"),
    }
    side = vision["image_size"] // max(vision["patch_size"], 1)
    fold = f.integer("projector.scale_factor", _AVERAGED)
    if not fold or side % fold:
        raise f.m.fail(
            "clip.vision.projector.scale_factor", fold, f"a divisor of the {side} patches of a side"
        )
    return {"vision_config": vision, "mm_tokens_per_image": (side // fold) ** 2}


def _gemma3_processor(f: Facts) -> Config:
    side = f.integer("image_size")
    return f.colours() | {"size": {"height": side, "width": side}}


def _internvl(f: Facts) -> Config:
    biased = "v.blk.0.attn_q.bias" in f.c.tensors
    vision = f.sizes() | {
        "model_type": "internvl_vision",
        "image_size": f.integer("image_size"),
        "hidden_act": f.activation("gelu"),
        "attention_bias": biased,
        "use_mean_pooling": "v.post_ln.weight" not in f.c.tensors,
    }
    fold = f.integer("projector.scale_factor")
    if not fold:
        raise f.m.fail("clip.vision.projector.scale_factor", fold, "above 0")
    return {"vision_config": vision, "downsample_ratio": 1 / fold}


def _internvl_processor(f: Facts) -> Config:
    side = f.integer("image_size")
    return f.colours() | {
        "size": {"height": side, "width": side},
        "min_patches": f.integer("preproc_min_tiles", 1),
        "max_patches": f.integer("preproc_max_tiles", 12),
    }


def _lfm2(f: Facts) -> Config:
    f.integer("image_size", 0)  # pictures have any
    vision = f.sizes() | {
        "model_type": "siglip2_vision_model",
        "num_patches": _places(f),
        "hidden_act": f.activation("gelu_pytorch_tanh"),
    }
    return {
        "vision_config": vision,
        "downsample_factor": f.integer("projector.scale_factor"),
        "projector_hidden_size": f.shape("mm.1.weight")[0],
        "projector_bias": "mm.1.bias" in f.c.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in f.c.tensors,
    }


def _lfm2_processor(f: Facts) -> Config:
    fold = f.integer("projector.scale_factor")
    own = {"encoder_patch_size": f.integer("patch_size"), "downsample_factor": fold}
    return f.colours() | own


def _places(f: Facts) -> int:
    """Rows of the table of positions."""
    *rows, _ = f.shape("v.position_embd.weight")
    return math.prod(rows)


def _grid(f: Facts) -> Config:
    """What all of Qwen's towers have."""
    if abs(f.epsilon - 1e-6) > 1e-9:
        raise f.m.fail("clip.vision.attention.layer_norm_epsilon", f.epsilon, "1e-06")
    f.integer("image_size", 0)  # pictures have any
    return {
        "depth": f.layers,
        "hidden_size": f.integer("embedding_length"),
        "intermediate_size": f.inner,
        "num_heads": f.integer("attention.head_count"),
        "patch_size": f.integer("patch_size"),
        "spatial_merge_size": _merged(f),
        "temporal_patch_size": 2,
    }


def _merged(f: Facts) -> int:
    return f.integer("spatial_merge_size", 2)


def _qwen2(f: Facts) -> Config:
    vision = _grid(f)
    hidden = vision["embed_dim"] = vision["hidden_size"]
    if not hidden:
        raise f.m.fail("clip.vision.embedding_length", hidden, "above 0")
    vision["hidden_size"] = f.shape("mm.2.weight")[0]
    vision["mlp_ratio"] = share_of(vision.pop("intermediate_size"), hidden)
    return {"vision_config": vision | {"hidden_act": f.activation("gelu")}}


def _qwen2_5(f: Facts) -> Config:
    every, vision = f.integer("n_wa_pattern"), _grid(f)
    if not every:
        raise f.m.fail("clip.vision.n_wa_pattern", every, "above 0")
    vision |= {
        "hidden_act": f.activation("gelu"),
        "out_hidden_size": f.shape("mm.2.weight")[0],
        "window_size": f.integer("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(every - 1, vision["depth"], every)),
    }
    return {"vision_config": vision}


def _qwen3(f: Facts) -> Config:
    vision = _grid(f) | {
        "hidden_act": f.activation("gelu_pytorch_tanh"),
        "out_hidden_size": f.shape("mm.2.weight")[0],
        "num_position_embeddings": _places(f),
    }
    return {"vision_config": vision}


def deep_layers(f: Facts) -> list[int]:
    """Layers of the tower whose rows go to the decoder's first layers, too."""
    key = "clip.vision.is_deepstack_layers"
    flags = f.m.get(key, [])
    if not isinstance(flags, list) or not all(type(flag) is bool for flag in flags):
        raise f.m.fail(key, flags, "a truth value of each layer")
    return [i for i, flag in enumerate(flags) if flag]


def _grid_processor(f: Facts) -> Config:
    patch, fold = f.integer("patch_size"), _merged(f)
    least, most = (tokens * (patch * fold) ** 2 for tokens in _QWEN_TOKENS)
    return f.colours() | {
        "patch_size": patch,
        "merge_size": fold,
        "min_pixels": f.integer("image_min_pixels", least),
        "max_pixels": f.integer("image_max_pixels", most),
    }


def _siglip_names(at: str) -> dict[str, str]:
    """CLIP's and SigLIP's, below `at`."""
    layer = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    return {f"blk.{stem}": f"{at}.encoder.layers.{{i}}.{name}" for stem, name in layer.items()} | {
        "v.patch_embd": f"{at}.embeddings.patch_embedding",
        "v.position_embd": f"{at}.embeddings.position_embedding",
        "v.post_ln": f"{at}.post_layernorm",
    }


def _qwen_names(**mlp: str) -> dict[str, str]:
    """Of all of Qwen's towers; mlp: names of a layer's block."""
    layer = {f"attn_{x}": f"attn.{x}" for x in ("q", "k", "v", "qkv")} | {
        "attn_out": "attn.proj",
        "ln1": "norm1",
        "ln2": "norm2",
    }
    layer |= {stem: f"mlp.{name}" for stem, name in mlp.items()}
    found = {f"blk.{stem}": f"visual.blocks.{{i}}.{name}" for stem, name in layer.items()}
    return found | {"v.patch_embd": "visual.patch_embed.proj"}


_QWEN2_MERGER = {
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN3_NAMES = _qwen_names(ffn_up="linear_fc1", ffn_down="linear_fc2") | {
    "v.position_embd": "visual.pos_embed",
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
    "deepstack.norm": "visual.deepstack_merger_list.{i}.norm",
    "deepstack.fc1": "visual.deepstack_merger_list.{i}.linear_fc1",
    "deepstack.fc2": "visual.deepstack_merger_list.{i}.linear_fc2",
}
_INTERN = "vision_tower.encoder.layer.{i}."
_INTERN_NAMES = {f"blk.attn_{x}": f"{_INTERN}attention.{x}_proj" for x in "qkv"} | {
    "blk.attn_out": f"{_INTERN}attention.projection_layer",
    "blk.ln1": f"{_INTERN}layernorm_before",
    "blk.ln2": f"{_INTERN}layernorm_after",
    "blk.ls1": f"{_INTERN}lambda_1",
    "blk.ls2": f"{_INTERN}lambda_2",
    "blk.ffn_up": f"{_INTERN}mlp.fc1",
    "blk.ffn_down": f"{_INTERN}mlp.fc2",
    "v.class_embd": "vision_tower.embeddings.cls_token",
    "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
    "v.position_embd": "vision_tower.embeddings.position_embeddings",
    "v.post_ln": "vision_tower.layernorm",
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
}
_TWO = "multi_modal_projector.linear_{}"


def _table(weight: Tensor) -> Tensor:
    """[…, D] → [n, D]."""
    return weight.reshape(-1, weight.shape[-1])


def _one_of_tables(weight: Tensor) -> Tensor:
    """[…, D] → [1, n, D]."""
    return _table(weight).unsqueeze(0)


def _less_one(weight: Tensor) -> Tensor:
    """A norm's that converters add 1 to."""
    return weight.float() - 1.0


def _colours_last(weight: Tensor) -> Tensor:
    """[D, 3, p, p] → [D, p · p · 3]."""
    return weight.permute(0, 2, 3, 1).flatten(1)


PROJECTORS: dict[str, ProjectorType] = {
    "idefics3": ProjectorType(
        {"llama": "Idefics3ForConditionalGeneration"},
        ("<image>",),
        _siglip_names("vision_model") | {"mm.model.fc": "connector.modality_projection.proj"},
        "mm.model.fc",
        _idefics3,
        _idefics3_processor,
        {"vision_model.embeddings.position_embedding.weight": _table},
    ),
    "mlp": ProjectorType(
        dict.fromkeys(("llama", "qwen2"), "LlavaForConditionalGeneration"),
        ("<image>", "<unk>"),  # most files have no such token
        {k: v for k, v in _siglip_names("vision_tower").items() if k != "v.post_ln"}
        | {
            "v.class_embd": "vision_tower.embeddings.class_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "mm.0": _TWO.format(1),
            "mm.2": _TWO.format(2),
        },
        "mm.2",
        _llava,
        _llava_processor,
        {
            "vision_tower.embeddings.class_embedding": Tensor.flatten,
            "vision_tower.embeddings.position_embedding.weight": _table,
        },
    ),
    "qwen2vl_merger": ProjectorType(
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        ("<|image_pad|>",),
        _qwen_names(ffn_up="fc1", ffn_down="fc2") | _QWEN2_MERGER,
        "mm.2",
        _qwen2,
        _grid_processor,
    ),
    "qwen2.5vl_merger": ProjectorType(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        ("<|image_pad|>",),
        _qwen_names(ffn_gate="gate_proj", ffn_up="up_proj", ffn_down="down_proj") | _QWEN2_MERGER,
        "mm.2",
        _qwen2_5,
        _grid_processor,
    ),
    "qwen3vl_merger": ProjectorType(
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        ("<|image_pad|>",),
        _QWEN3_NAMES,
        "mm.2",
        _qwen3,
        _grid_processor,
        {"visual.pos_embed.weight": _table},
    ),
    "gemma3": ProjectorType(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        ("<image_soft_token>", "<unused6241>"),  # the first lies behind the last row of some files
        _siglip_names("vision_tower")
        | {
            "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        "mm.input_projection",
        _gemma3,
        _gemma3_processor,
        {
            "vision_tower.embeddings.position_embedding.weight": _table,
            "multi_modal_projector.mm_soft_emb_norm.weight": _less_one,
        },
        ("<start_of_image>", "<end_of_image>"),
        turned=True,
    ),
    "internvl": ProjectorType(
        dict.fromkeys(("llama", "qwen2", "qwen3"), "InternVLForConditionalGeneration"),
        ("<IMG_CONTEXT>",),
        _INTERN_NAMES,
        "mm.model.mlp.3",
        _internvl,
        _internvl_processor,
        {
            "vision_tower.embeddings.cls_token": _one_of_tables,
            "vision_tower.embeddings.position_embeddings": _one_of_tables,
        },
    ),
    "lfm2": ProjectorType(
        dict.fromkeys(("lfm2", "lfm2moe"), "Lfm2VlForConditionalGeneration"),
        ("<image>",),
        _siglip_names("vision_tower")
        | {
            "mm.input_norm": "multi_modal_projector.layer_norm",
            "mm.1": _TWO.format(1),
            "mm.2": _TWO.format(2),
        },
        "mm.2",
        _lfm2,
        _lfm2_processor,
        {
            "vision_tower.embeddings.patch_embedding.weight": _colours_last,
            "vision_tower.embeddings.position_embedding.weight": _table,
        },
    ),
}
"""Built types by their names."""

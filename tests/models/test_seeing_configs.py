"""Configs of models that see: published ones, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.models.published_states import PUBLISHED_STATES
from tests.models.seeing import (
    make_gemma3,
    make_lfm2,
    make_llava,
    make_llava_next,
    make_mistral3,
    make_qwen3,
)
from tests.models.test_seeing import change

from penstock.errors import UnsupportedModelError
from penstock.models.registry import read_spec, spec_of
from penstock.nn.spec import GridSpec, VisionSpec


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    make_llava(tmp_path)
    return tmp_path


def test_a_published_lfm2_vl() -> None:
    """LFM2-VL-450M's config as of 2025, from memory: no key is left."""
    text = PUBLISHED_STATES["LFM2-1.2B"] | {
        "block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "conv_dim_out": 1024,
        "hidden_size": 1024, "num_attention_heads": 16, "num_heads": 16,
    }  # fmt: skip
    vision = {
        "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768,
        "intermediate_size": 3072, "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model",
        "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "num_patches": 256,
        "patch_size": 16, "torch_dtype": "bfloat16", "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True,
        "downsample_factor": 2, "encoder_patch_size": 16, "image_token_index": 396,
        "max_image_tokens": 256, "max_num_patches": 1024, "max_pixels_tolerance": 2.0,
        "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "model_type": "lfm2-vl",
        "projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560,
        "text_config": text, "tile_size": 512, "torch_dtype": "bfloat16",
        "use_image_special_tokens": True, "use_thumbnail": True, "vision_config": vision,
        "vision_feature_layer": -1,
    }  # fmt: skip
    spec = spec_of(config, "LFM2-VL-450M", strict=True)
    assert spec.pictures is not None and spec.pictures.token_id == 396
    assert spec.decoder.hidden == 1024 and spec.decoder.tied
    tower = spec.decoder.vision
    assert isinstance(tower, GridSpec) and len(tower.layers) == 12
    assert (tower.hidden, tower.table_side, tower.theta) == (768, 16, 0.0)
    assert (tower.projector.inner, tower.projector.fold) == (2560, 2)


def test_a_published_gemma3() -> None:
    """Gemma-3-4b-it's config as of 2025, from memory: no key is left."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
        "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "model_type": "siglip_vision_model", "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    spec = spec_of(config, "gemma-3-4b-it", strict=True)
    assert spec.eos_token_ids == (1, 106) and spec.decoder.tied and spec.dtype == "bfloat16"
    windows = [layer.attention.window for layer in spec.decoder.layers]
    assert windows[:7] == [1024] * 5 + [0, 1024] and len(windows) == 34
    first, sixth = spec.decoder.layers[0].attention, spec.decoder.layers[5].attention
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (8, 4, 256)
    assert first.rope is not None and sixth.rope is not None
    assert (first.rope.theta, sixth.rope.theta, sixth.rope.factor) == (1e4, 1e6, 8.0)
    tower = spec.decoder.vision
    assert isinstance(tower, VisionSpec) and (tower.tokens, tower.projector.fold) == (256, 4)
    assert spec.pictures is not None and spec.pictures.marks == (255_999, 256_000)
    assert spec.pictures.token_id == 262_144 and spec.pictures.both_ways


def test_a_published_mistral_small() -> None:
    """Mistral-Small-3.1-24B-Instruct-2503's config, from memory: no key is left."""
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1e9, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
            "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096,
            "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
            "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    }  # fmt: skip
    spec = spec_of(config, "Mistral-Small-3.1-24B", strict=True)
    assert not spec.decoder.tied and spec.decoder.hidden == 5120
    assert spec.pictures is not None and spec.pictures.token_id == 10
    tower = spec.decoder.vision
    assert isinstance(tower, GridSpec) and len(tower.layers) == 24
    assert (tower.patch, tower.projector.fold, tower.projector.merges) == (14, 2, True)
    assert tower.layers[0].mlp.gated and tower.layers[0].mlp.activation == "silu"


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        (None, {"vision_feature_layer": [1, 2]}, "features of several layers aren't built"),
        (None, {"vision_feature_layer": -9}, "-9 isn't one of the 3 layers"),
        (None, {"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ("vision_config", {"model_type": "pixtral"}, "model_type='pixtral'"),
        ("vision_config", {"num_attention_heads": 5}, "isn't a multiple of num_attention_heads 5"),
        ("vision_config", {"patch_size": 57}, "image_size 56 has 0 patches"),
        ("vision_config", {"num_channels": 1}, "num_channels=1"),
        ("text_config", {"model_type": "gpt2"}, "model_type='gpt2'"),
        ("text_config", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("text_config", {"logit_scale": 2.0}, "logit_scale"),
    ],
)
def test_what_isnt_built(part: str | None, values: dict[str, Any], said: str, llava: Path) -> None:
    change(llava, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(llava)


def test_keys_that_nobody_reads_are_named_wherever_they_stand(llava: Path) -> None:
    change(llava, "vision_config", new_norm=True)
    with pytest.warns(UserWarning, match="new_norm"):
        read_spec(llava)
    with pytest.raises(UnsupportedModelError, match="new_norm"):
        read_spec(llava, strict=True)


def test_published_configs_leave_out_what_is_like_their_kind(llava: Path) -> None:
    """As LLaVA 1.5's: a Llama's shape goes without saying."""
    said = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    change(llava, text_config=said, image_token_index=32000)
    spec = read_spec(llava).decoder
    first = spec.layers[0]
    assert (spec.hidden, len(spec.layers), first.mlp.intermediate) == (4096, 32, 11008)
    assert spec.vision is not None and spec.vision.projector.out == 4096
    assert (first.attention.num_heads, spec.vision.tokens) == (32, 16)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, r"\[2, 0\] aren't layers of 4"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, "of the text model's 2"),
        ("vision_config", {"num_position_embeddings": 37}, "num_position_embeddings=37"),
        ("vision_config", {"out_hidden_size": 65}, "out_hidden_size=65"),
        ("vision_config", {"num_heads": 3}, "aren't those of num_heads 3"),
        ("text_config", {"rope_parameters": {"rope_type": "default"}}, "has no mrope_section"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
            "three numbers of pairs, 8 together",
        ),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [1, 1, 6], "mrope_interleaved": True}},
            "can't take turns",
        ),
    ],
)
def test_what_isnt_built_of_qwens(
    part: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_qwen3(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("vision_config", {"num_patches": 24}, "num_patches 24 aren't those of a square"),
        ("vision_config", {"model_type": "siglip"}, "model_type='siglip'"),
        ("vision_config", {"num_attention_heads": 5}, "isn't a multiple of num_attention_heads 5"),
        ("vision_config", {"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ("text_config", {"model_type": "llama"}, "model_type='llama'"),
        (None, {"use_image_special_tokens": False}, "use_image_special_tokens=False"),
        (None, {"vision_feature_layer": -2}, "vision_feature_layer=-2"),
        (None, {"image_token_index": 5}, "image_token_index=5; built for this family: 257"),
        (None, {"downsample_factor": 0}, "downsample_factor must be a"),
    ],
)
def test_what_isnt_built_of_lfm2(
    part: str | None, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_lfm2(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        (None, {"mm_tokens_per_image": 9}, "mm_tokens_per_image 9 must be a square, .* 8 patches"),
        (None, {"mm_tokens_per_image": 8}, "mm_tokens_per_image 8 must be a square"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type='clip_vision_model'"),
        ("text_config", {"model_type": "gemma2"}, "model_type='gemma2'"),
        ("text_config", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ],
)
def test_what_isnt_built_of_gemma3(
    part: str | None, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_gemma3(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


def test_a_published_llava_next() -> None:
    """llava-v1.6-mistral-7b-hf's config, from memory: no key is left."""
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"], "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_seq_length": 576, "image_token_index": 32000, "model_type": "llava_next",
        "multimodal_projector_bias": True, "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"], "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "vocab_size": 32064,
        },
        "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "model_type": "clip_vision_model", "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
        },
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }  # fmt: skip
    spec = spec_of(config, "llava-v1.6-mistral-7b-hf", strict=True)
    assert (spec.decoder.hidden, len(spec.decoder.layers), spec.decoder.vocab_size) == (
        4096, 32, 32064,
    )  # fmt: skip
    tower = spec.decoder.vision
    assert isinstance(tower, VisionSpec) and tower.ends_lines and len(tower.layers) == 23
    assert spec.pictures is not None and len(spec.pictures.shapes) == 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image_grid_pinpoints": [[56, 57]]}, "aren't heights and widths"),
        ({"image_grid_pinpoints": []}, "aren't heights and widths"),
        ({"use_image_newline_parameter": False}, "use_image_newline_parameter=False"),
        ({"vision_feature_select_strategy": "full"}, "a row that isn't a patch's"),
    ],
)
def test_what_isnt_built_of_llava_next(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_llava_next(tmp_path)
    change(tmp_path, None, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        (None, {"vision_feature_layer": [-1, -2]}, "vision_feature_layer="),
        (None, {"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "siglip_vision_model"),
        ("vision_config", {"num_attention_heads": 3}, "aren't those of num_attention_heads 3"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("text_config", {"model_type": "llama"}, "model_type='llama'"),
    ],
)
def test_what_isnt_built_of_mistral3(
    part: str | None, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_mistral3(tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises(UnsupportedModelError, match=said):
        read_spec(tmp_path)

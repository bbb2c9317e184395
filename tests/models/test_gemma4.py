"""Gemma 4: configs as they were published, what is refused, towers that are left, and the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.tiny_gemma4 import GEMMA4
from tiny import Case, Make, Sequence, make_model

from penstock import LLM, SamplingParams
from penstock.errors import UnsupportedModelError
from penstock.kernels import native
from penstock.models import ModelSpec, read_spec
from penstock.models.load import load_model
from penstock.nn import DecoderSpec
from penstock.nn.spec import ExpertsSpec, InputsSpec
from penstock.runtime.device import CPU

FULL, SLIDES = "full_attention", "sliding_attention"
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "max_position_embeddings": 262_144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDES: {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
PUBLISHED = {
    "gemma-4-31B": {
        **TEXT,
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "layer_types": ([SLIDES] * 5 + [FULL]) * 10,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "use_bidirectional_attention": "vision",
    },
    "gemma-4-26B-A4B": {
        **TEXT,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": ([SLIDES] * 5 + [FULL]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
    },
    "gemma-4-E2B": {
        **TEXT,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ([SLIDES] * 4 + [FULL]) * 7,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_double_wide_mlp": True,
    },
    "gemma-4-E4B": {
        **TEXT,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10_240,
        "layer_types": ([SLIDES] * 5 + [FULL]) * 7,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
    },
}
"""Text configs; sizes as the models' cards say."""
NEEDS_NATIVE = pytest.mark.skipif(
    native.handle is None, reason=f"no native kernels: {native.reason}"
)


def read(config: dict[str, Any], folder: Path) -> ModelSpec:
    """A key that nothing reads is an error."""
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder, strict=True)


def published(name: str, folder: Path) -> DecoderSpec:
    """What the text config of that model describes."""
    spec = read(PUBLISHED[name], folder)
    assert (spec.family, spec.dtype) == ("gemma4", "bfloat16")
    return spec.decoder


def test_a_dense_one(tmp_path: Path) -> None:
    found = published("gemma-4-31B", tmp_path)
    slides, whole = found.layers[0].attention, found.layers[5].attention
    assert (slides.window, slides.num_kv_heads, slides.head_dim, slides.parts) == (1024, 16, 256, 3)
    assert (whole.window, whole.num_kv_heads, whole.head_dim, whole.parts) == (0, 4, 512, 2)
    assert slides.scale == whole.scale == 1.0 and slides.value_norm and whole.value_norm
    assert slides.rope is not None and whole.rope is not None
    assert (slides.rope.kind, slides.rope.rotary_dim, slides.rope.theta) == ("default", 256, 1e4)
    rope = whole.rope
    assert (rope.kind, rope.rotary_dim, rope.moving_dim) == ("proportional", 512, 128)
    assert whole.qkv_columns == (32 * 512, 4 * 512, 0)
    assert found.inputs is None and found.tied and found.final_softcap == 30.0
    assert all(layer.scalar and not layer.input_dim for layer in found.layers)


def test_one_with_experts(tmp_path: Path) -> None:
    mlp = published("gemma-4-26B-A4B", tmp_path).layers[0].mlp
    assert mlp.intermediate == 704 and mlp.activation == "gelu_tanh"
    assert mlp.experts == ExpertsSpec(128, 8, True, shared=2112, apart=True, weighed=True)


def test_one_whose_layers_share(tmp_path: Path) -> None:
    found = published("gemma-4-E2B", tmp_path)
    reads = [layer.attention.reads for layer in found.layers]
    assert reads == [None] * 15 + ([13] * 4 + [14]) * 4
    assert [layer.mlp.intermediate for layer in found.layers] == [6144] * 15 + [12_288] * 20
    assert found.inputs == InputsSpec(256, 262_144)
    assert found.layers[15].attention.qkv_columns == (8 * 256, 0, 0)
    layout = CPU.layout(found.layers, torch.bfloat16, 32)
    token = 2 * 2 * (12 * 256 + 3 * 512)  # of 15 layers, not of 35
    assert layout.bytes_per_block == 32 * token
    kv = layout.allocate(2)
    assert [len(layer) for layer in kv] == [2] * 15 + [0] * 20


def test_one_whose_layers_share_and_are_no_wider(tmp_path: Path) -> None:
    found = published("gemma-4-E4B", tmp_path)
    reads = [layer.attention.reads for layer in found.layers]
    assert reads == [None] * 24 + ([22] * 5 + [23]) * 3
    assert {layer.mlp.intermediate for layer in found.layers} == {10_240}
    assert found.layers[41].attention.qkv_columns == (8 * 512, 0, 0)


def test_what_ends_a_text_where_nothing_says_so(tmp_path: Path) -> None:
    config = {key: x for key, x in PUBLISHED["gemma-4-31B"].items() if key != "eos_token_id"}
    assert read(config, tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"layer_types": [FULL, SLIDES] * 2}, "the last layer slides"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be a number from 0 to 3: 4"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers 3 lets layer 1 read"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers must be"),
        ({"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8}, "300 is below"),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input must be a positive"),
        ({"enable_moe_block": True}, "no 'num_experts'"),
        (
            {
                "enable_moe_block": True, "num_experts": 4, "top_k_experts": 5,
                "moe_intermediate_size": 16,
            },
            "top_k_experts 5 is more than the 4",
        ),
        (
            {
                "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                "moe_intermediate_size": 16, "use_double_wide_mlp": True,
            },
            "one of them is built",
        ),
        ({"per_layer_config": {"1": {"head_dim": 40, "window": 3}}}, "says window of layer 1"),
        ({"per_layer_config": {"4": {"head_dim": 40}}}, "layers that there aren't: 4"),
        ({"per_layer_config": {"1": {"head_dim": 40}}}, "the same of all layers with full"),
        (
            {
                "per_layer_config": {key: {"num_key_value_heads": 3} for key in "13"},
                "global_head_dim": None,
                "num_global_key_value_heads": None,
            },
            "not a multiple of",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "nothing reads: rope_theta"),
        (
            {"rope_parameters": {FULL: {"rope_type": "default", "partial_rotary_factor": 0.25}}},
            "built for rope_type 'proportional'",
        ),
        (
            {"rope_parameters": {SLIDES: {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            "built for rope_type 'proportional'",
        ),
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ({"kv_rank": 16}, "values are normed"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {
        "model_type": "gemma4_text", **GEMMA4["gemma4"], "hidden_size": 64, "vocab_size": 320,
        "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    read(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        read(config | changes, tmp_path)


def test_sizes_are_said_once(tmp_path: Path) -> None:
    """`per_layer_config` counts: what contradicts it is named, and what is absent isn't missed."""
    config = {
        "model_type": "gemma4_text", **GEMMA4["gemma4"], "hidden_size": 64, "vocab_size": 320,
        "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
        "per_layer_config": {key: {"head_dim": 32} for key in "13"}, "global_head_dim": None,
        "num_global_key_value_heads": None,
    }  # fmt: skip
    alone = read(config, tmp_path)
    assert "global_head_dim" not in dict(alone.unsaid)
    with pytest.warns(UserWarning, match="global_head_dim=33, but per_layer_config 32"):
        beside = read(config | {"global_head_dim": 33}, tmp_path)
    assert beside == alone


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_towers_are_left(tiny: Make, kind: str, tmp_path: Path) -> None:
    """Of a model that sees: its decoder is the text model's, and a warning says what is left."""
    case = tiny("gemma4")
    config = json.loads((case.folder / "config.json").read_text())
    text = {k: v for k, v in config.items() if k not in ("architectures", "transformers_version")}
    if kind == "gemma4_unified":
        for key in ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
                    "num_experts", "top_k_experts", "moe_intermediate_size"):  # fmt: skip
            text.pop(key, None)
    whole = {
        "architectures": [f"{kind.title().replace('_', '')}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": "float32",
        "text_config": {**text, "model_type": f"{kind}_text"},
        "vision_config": {"model_type": f"{kind}_vision"},
        "audio_config": None,
        "eos_token_id": [1, 106],
        "image_token_id": 258_880,
        "boi_token_id": 255_999,
        "eoa_token_index": 258_883,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(case.folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    for tower in ("vision_tower.encoder.w", "embed_vision.w", "audio_tower.w", "embed_audio.w"):
        named[f"model.{tower}"] = torch.ones(3)
    save_file(named, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="its decoder is read, for text"):
        found = load_model(tmp_path, max_model_len=case.case.max_len, strict=True)
    assert found.spec.pictures is None and found.spec.eos_token_ids == (1, 106)
    got = Sequence(found.model).feed(case.prompt)
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt))


def test_the_unified_kind(tiny: Make, tmp_path: Path) -> None:
    """Its text model, which has neither inputs of layers nor experts."""
    keys = {key: x for key, x in GEMMA4["gemma4"].items() if "per_layer_input" not in key}
    case = Case("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextConfig", keys)
    model = make_model(case)
    model.save_pretrained(tmp_path)
    found = load_model(tmp_path, max_model_len=case.max_len, strict=True)
    tokens = tiny("gemma4").prompt
    with torch.inference_mode():
        want = model(tokens[None]).logits[0]
    torch.testing.assert_close(Sequence(found.model).feed(tokens), want, rtol=0, atol=1e-4)


def test_a_whole_model_as_transformers_writes_it(tiny: Make, tmp_path: Path) -> None:
    """With its towers' tensors, of any names that they have there."""
    case = tiny("gemma4-inputs")
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    }  # fmt: skip
    audio = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "subsampling_conv_channels": [4, 4], "output_proj_dims": 16,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=case.case.make_config().to_dict(), vision_config=vision, audio_config=audio
    )
    whole = transformers.Gemma4ForConditionalGeneration(config).eval()
    missing, beyond = whole.model.language_model.load_state_dict(
        case.oracle.model.state_dict(), strict=False
    )
    assert not missing and not beyond
    whole.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="for text"):
        found = load_model(tmp_path, max_model_len=case.case.max_len)
    got = Sequence(found.model).feed(case.prompt)
    torch.testing.assert_close(got, case.expect(case.prompt), rtol=0, atol=1e-4)


def test_keys_that_no_layer_reads_are_left(tiny: Make, tmp_path: Path) -> None:
    """Published files have them for layers that read another's."""
    case = tiny("gemma4-inputs")
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_model(tmp_path, max_model_len=case.case.max_len)
    got = Sequence(found.model).feed(case.prompt[:9])
    assert torch.equal(got, Sequence(case.load().model).feed(case.prompt[:9]))


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEMMA4)
def test_chunks_and_batches_change_no_bit(tiny: Make, name: str, dtype: str) -> None:
    """Prompts in chunks and beside others, greedy tokens after them: all as alone, in one piece."""
    case = tiny(name)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    prompts = [case.prompt[first:].tolist() for first in (0, 7, 31, 66)]

    def answers(prompts: list[list[int]], **limits: Any) -> list[Any]:
        llm = LLM(
            case.folder, dtype=dtype, max_model_len=case.case.max_len, skip_tokenizer_init=True,
            **limits,
        )  # fmt: skip
        found = llm.generate(prompts, params)
        return [(o.outputs[0].token_ids, o.prompt_logprobs) for o in found]

    alone = [answers([prompt])[0] for prompt in prompts]
    assert answers(prompts, max_num_batched_tokens=16, max_num_seqs=3) == alone
    assert answers(prompts) == alone


@NEEDS_NATIVE
@pytest.mark.parametrize("stored", ["int8", "fp8", "int4", "kivi"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-inputs"])
def test_caches_of_fewer_bits(tiny: Make, name: str, stored: str) -> None:
    """Layers that read another's keys read its codes; and blocks that prompts share are found."""
    case = tiny(name)
    llm = LLM(
        case.folder, dtype="bfloat16", max_model_len=case.case.max_len, skip_tokenizer_init=True,
        kv_cache_dtype=stored,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    first, again = (llm.generate([case.prompt.tolist()], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert len(first.outputs[0].token_ids) == 5


@NEEDS_NATIVE
def test_it_can_t_be_divided(tiny: Make) -> None:
    case = tiny("gemma4-inputs")
    with pytest.raises(UnsupportedModelError, match=r"normed.*can't be divided among processes"):
        LLM(case.folder, skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=64)

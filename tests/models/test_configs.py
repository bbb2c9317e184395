"""Reading `config.json`: both spellings, published ones, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import PUBLISHED as DENSE
from published_dense import PUBLISHED_DENSE
from published_experts import PUBLISHED_EXPERTS
from published_later import PUBLISHED_LATER
from published_mixed import PUBLISHED_MIXED
from published_states import PUBLISHED_STATES
from tiny import CASES, GEMMA3_ROPE

from penstock.errors import ModelNotFoundError, UnsupportedModelError
from penstock.models import ModelSpec, architectures, read_spec
from penstock.nn import DeltaSpec, ExpertsSpec, LatentSpec

PUBLISHED = DENSE | PUBLISHED_DENSE | PUBLISHED_EXPERTS | PUBLISHED_STATES
PUBLISHED |= PUBLISHED_LATER | PUBLISHED_MIXED

FULL, SLIDES = "full_attention", "sliding_attention"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Read a config as a checkpoint's; a key that nothing reads is an error."""

    def reader(config: dict[str, Any], *, strict: bool = True) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_spec(tmp_path, strict=strict)

    return reader


def newer(name: str) -> dict[str, Any]:
    """A tiny config as transformers 5 writes it."""
    case = CASES[name]
    config = case.make_config()
    config.architectures = [case.model]
    config.dtype = "float32"
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return written


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it."""
    config = copy.deepcopy(config)
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma4_text":
        own = next(iter(config.pop("per_layer_config").values()))
        config["global_head_dim"] = own["head_dim"]
        config["num_global_key_value_heads"] = own.get("num_key_value_heads")
        return config
    if config["model_type"] in ("cohere2_moe", "mellum"):  # which it didn't know
        return config
    if config.get("layer_types", [None])[0] != FULL or "linear_key_head_dim" not in config:
        types = config.pop("layer_types", None)  # not in the tiny Qwen3.5's family's order
        if "conv_L_cache" in config:
            config["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == FULL]
        elif config["model_type"] == "granitemoehybrid":
            config["layer_types"] = ["attention" if kind == FULL else "mamba" for kind in types]
    ropes = config.pop("rope_parameters", None)
    if ropes is None:
        return config
    if config["model_type"] == "olmo3":
        ropes = ropes[FULL]
    elif FULL in ropes:
        config["rope_local_base_freq"] = ropes[SLIDES]["rope_theta"]
        ropes = ropes[FULL]
    base = "rotary_emb_base" if config["model_type"] == "gpt_neox" else "rope_theta"
    config[base] = ropes.pop("rope_theta")
    if "partial_rotary_factor" in ropes:
        share = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
        config[share] = ropes.pop("partial_rotary_factor")
    kind = ropes.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **ropes}
    return config


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_say_the_same(read: Any, name: str) -> None:
    config = newer(name)
    spec = read(config)
    assert read(older(config)) == spec
    assert spec.dtype == "float32"
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


TIED = ("gemma", "gemma2", "gemma3", "smollm3", "gpt2", "cohere", "cohere2", "starcoder2")
TIED += ("lfm2", "lfm2_moe", "vaultgemma", "falcon")
"""Families whose head is the embedding where config.json says nothing."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_no_unread_key(read: Any, name: str) -> None:
    config, spec = PUBLISHED[name], read(PUBLISHED[name])
    hidden = config.get("hidden_size", config.get("n_embd"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    attention = next(
        x.attention
        for x in spec.decoder.layers[::-1]
        if not x.attention.conv and not x.attention.mamba
    )
    layers = spec.decoder.depth
    if spec.family == "nemotron_h":  # each feed-forward block is counted, too
        both = (x for x in spec.decoder.layers if not x.attention.is_absent)
        layers += sum(layer.mlp.intermediate > 0 for layer in both)
    assert layers == config.get("num_hidden_layers", config.get("n_layer"))
    assert spec.decoder.hidden == hidden
    assert attention.num_kv_heads == config.get(
        "num_key_value_heads", config.get("num_kv_heads", heads)
    )
    dim = sum(config.get(key) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    assert attention.head_dim == (dim or config.get("head_dim", hidden // heads))
    assert spec.decoder.tied is config.get("tie_word_embeddings", spec.family in TIED)
    assert spec.dtype == config.get("torch_dtype")


def test_what_is_special_about_published_configs(read: Any) -> None:
    def layers(name: str) -> Any:
        return read(PUBLISHED[name]).decoder.layers

    rope = layers("Llama-3.2-1B-Instruct")[0].attention.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.theta) == (1.0, 4.0, 500000.0)
    assert {x.attention.window for x in layers("Mistral-7B-v0.1")} == {4096}
    assert {x.attention.window for x in layers("Mistral-Nemo-Instruct")} == {0}
    assert {x.attention.window for x in layers("Qwen2.5-7B")} == {0}
    assert [x.attention.window for x in layers("gemma-2-2b-it")] == [4096, 0] * 13
    gemma = layers("gemma-3-1b-it")
    assert [x.attention.window for x in gemma] == ([512] * 5 + [0]) * 4 + [512] * 2
    assert {(x.attention.window, x.attention.rope.theta) for x in gemma} == {(512, 1e4), (0, 1e6)}
    assert [x.attention.rope is None for x in layers("SmolLM3-3B")] == [False] * 3 + [True] + (
        [False] * 3 + [True]
    ) * 8
    rope = layers("Phi-4-mini")[0].attention.rope
    assert (rope.kind, rope.rotary_dim, rope.factor) == ("longrope", 96, 32.0)
    assert layers("Phi-3-mini-4k")[0].attention.window == 2047
    lite, large = layers("DeepSeek-V2-Lite"), layers("DeepSeek-V3")
    assert lite[0].attention.latent == LatentSpec(512, 128)
    assert large[0].attention.latent == LatentSpec(512, 128, query_rank=1536)
    sharper = (0.1 * 0.707 * math.log(40) + 1) ** 2  # DeepSeek's own code: mscale squared
    assert lite[0].attention.scale == pytest.approx(192**-0.5 * sharper)
    assert [layer.mlp.experts is None for layer in lite] == [True] + [False] * 26
    assert lite[1].mlp.experts == ExpertsSpec(64, 6, normalize=False, shared=2816)
    assert [layer.mlp.experts is None for layer in large] == [True] * 3 + [False] * 58
    assert large[3].mlp.experts == ExpertsSpec(
        256, 8, normalize=True, sigmoid=True, correction=True, groups=8, top_groups=4, scale=2.5,
        shared=2048,
    )  # fmt: skip
    assert layers("GLM-4.5-Air")[1].attention.rope.rotary_dim == 64
    assert layers("GLM-4.7-Flash")[1].attention.latent == LatentSpec(512, 256, query_rank=768)
    states = layers("Qwen3-Next-80B-A3B-Instruct")
    assert [layer.attention.delta is None for layer in states] == ([False] * 3 + [True]) * 12
    assert states[0].attention.delta == DeltaSpec(128, 4)
    assert states[0].attention.qkv_columns == (2048, 2048, 4096)
    assert states[0].mlp.experts == ExpertsSpec(
        512, 10, normalize=True, shared=512, shared_gate=True
    )
    turns = layers("Qwen3.5-27B, its text")[3].attention
    assert (turns.rope.sections, turns.rope.rotary_dim, turns.gated) == ((11, 11, 10), 64, True)
    assert layers("pythia-70m")[0].attention.rope.rotary_dim == 16
    assert layers("pythia-70m")[0].parallel
    mixed = layers("Qwen3-30B-A3B")[0].mlp
    assert (mixed.intermediate, mixed.experts.count, mixed.experts.per_token) == (768, 128, 8)
    assert mixed.experts.normalize
    assert not layers("OLMoE-1B-7B-0924")[0].mlp.experts.normalize
    oss = layers("gpt-oss-20b")
    assert [x.attention.window for x in oss] == [128, 0] * 12
    assert oss[0].attention.sinks
    rope = oss[0].attention.rope
    assert (rope.kind, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150000.0)
    assert (oss[0].mlp.activation, oss[0].mlp.bias) == ("swiglu_oai", True)


def test_what_is_special_about_later_ones(read: Any) -> None:
    def decoder(name: str) -> Any:
        return read(PUBLISHED[name]).decoder

    granite = decoder("granite-3.3-8b-instruct")
    assert granite.layers[0].attention.scale == 1 / 128
    assert granite.embed_scale == 12 / 0.22 and not granite.embed_scale_rounds
    assert (granite.logit_scale, granite.norm.eps) == (1 / 16, 1e-5 / 0.22**2)
    olmo = decoder("Olmo-3-7B-Instruct").layers
    assert [x.attention.window for x in olmo] == [*[4096] * 3, 0] * 8
    kinds = {(x.attention.window, x.attention.rope.kind, x.attention.rope.theta) for x in olmo}
    assert kinds == {(4096, "default", 5e5), (0, "yarn", 5e5)}
    gemma = decoder("gemma-2b")
    assert gemma.layers[0].mlp.activation == "gelu_tanh" and gemma.norm.offset == 1.0
    command = decoder("c4ai-command-r-v01")
    assert (command.logit_scale, command.max_position) == (0.0625, 131_072)
    assert command.layers[0].parallel and command.layers[0].one_norm
    assert command.layers[0].attention.rope.interleaved
    small = decoder("c4ai-command-r7b-12-2024").layers
    assert [x.attention.window for x in small] == [*[4096] * 3, 0] * 8
    assert [x.attention.rope is None for x in small] == [*[False] * 3, True] * 8
    glm, later = decoder("glm-4-9b-chat-hf"), decoder("GLM-4-9B-0414")
    assert {x.layers[0].attention.rope.rotary_dim for x in (glm, later)} == {64}
    assert (glm.layers[0].post_norm, later.layers[0].post_norm) == (False, True)
    assert later.layers[0].attention.qkv_bias and not later.layers[0].attention.out_bias
    star = decoder("starcoder2-3b").layers[0]
    assert (star.attention.window, star.mlp.gated, star.mlp.activation) == (
        4096,
        False,
        "gelu_tanh",
    )
    exaone = decoder("EXAONE-4.0-32B").layers
    assert [x.attention.rope is None for x in exaone] == [*[False] * 3, True] * 16
    assert exaone[0].attention.rope.kind == "llama3" and not exaone[0].pre_norm
    phi = decoder("phi-2")
    assert (phi.layers[0].attention.rope.rotary_dim, phi.head_bias) == (32, True)
    assert decoder("stablelm-2-1_6b").layers[0].attention.rope.rotary_dim == 16


def test_what_is_special_about_the_latest(read: Any) -> None:
    def decoder(name: str) -> Any:
        return read(PUBLISHED[name]).decoder

    ernie = decoder("ERNIE-4.5-21B-A3B-PT").layers
    assert [x.mlp.experts is None for x in ernie] == [True] + [False] * 27
    assert ernie[1].mlp.experts == ExpertsSpec(64, 6, normalize=True, correction=True, shared=3072)
    assert decoder("Nemotron-Mini-4B-Instruct").layers[0].attention.rope.rotary_dim == 64
    minimax = decoder("MiniMax-M2").layers[0]
    assert (minimax.attention.rope.rotary_dim, minimax.attention.qk_norm) == (64, "full")
    hunyuan = decoder("Hunyuan-A13B-Instruct").layers[0]
    assert hunyuan.attention.rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert hunyuan.mlp.experts == ExpertsSpec(64, 8, normalize=True, shared=3072)
    exaone = decoder("K-EXAONE-236B-A23B").layers
    assert [x.attention.window for x in exaone] == [*[128] * 3, 0] * 12
    assert [x.mlp.experts is None for x in exaone] == [True] + [False] * 47
    assert exaone[0].pre_norm and not exaone[0].post_norm
    trinity = decoder("Trinity-Mini")
    assert trinity.embed_scale == math.sqrt(2048) and trinity.layers[0].attention.gated
    assert [x.mlp.experts is None for x in trinity.layers] == [True] * 2 + [False] * 30
    assert trinity.layers[2].mlp.experts == ExpertsSpec(
        128, 8, normalize=True, sigmoid=True, correction=True, scale=2.826, shared=1024
    )
    assert not decoder("vaultgemma-1b").layers[0].post_norm
    gptj = decoder("gpt-j-6b")
    assert gptj.head_bias and gptj.layers[0].attention.rope.interleaved
    falcons = [decoder(name).layers[0] for name in ("falcon-40b", "falcon-11B")]
    assert [(x.parallel, x.one_norm) for x in falcons] == [(True, False), (True, True)]
    first = {**PUBLISHED["falcon-40b"], "new_decoder_architecture": False, "num_kv_heads": 71}
    first |= {"num_attention_heads": 71, "hidden_size": 4544, "num_hidden_layers": 32}
    layer = read(first).decoder.layers[0]
    assert (layer.attention.num_kv_heads, layer.one_norm) == (1, True)


def test_which_layers_of_a_cohere_2_with_experts_have_what(read: Any) -> None:
    keys = newer("cohere2-moe")
    want = read(keys)
    for key in ("layer_types", "mlp_layer_types"):
        del keys[key]
    assert read({**keys, "first_k_dense_replace": 1}) == want


def test_which_layers_of_an_exaone_slide(read: Any) -> None:
    keys = newer("exaone4")
    want = read(keys)
    del keys["layer_types"]
    assert read({**keys, "sliding_window_pattern": "LLLG"}) == want
    other = read({**keys, "sliding_window_pattern": "LG"}).decoder.layers
    assert [x.attention.window for x in other] == [19, 0, 19, 0]


def test_which_layers_of_a_ministral_slide(read: Any) -> None:
    keys = {**newer("ministral"), "layer_types": [FULL, SLIDES, FULL]}
    assert [x.attention.window for x in read(keys).decoder.layers] == [0, 19, 0]
    keys = {**newer("ministral"), "sliding_window": None}
    del keys["layer_types"]
    assert [x.attention.window for x in read(keys).decoder.layers] == [0, 0, 0]


def test_a_ministral_3_ends_where_its_queries_are_scaled(
    read: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = newer("ministral3")
    assert read(keys).decoder.max_position == 2000
    assert "scaled from position 2,000 on, which isn't built" in caplog.text
    caplog.clear()
    del keys["rope_parameters"]["llama_4_scaling_beta"]
    assert read(keys).decoder.max_position == 2500
    del keys["rope_parameters"]
    keys["max_position_embeddings"] = 262_144
    assert read(keys).decoder.max_position == 16_384
    assert len(caplog.records) == 1


def test_absent_and_null_differ(read: Any) -> None:
    """As in transformers: an absent key has the family's default, null switches off."""
    config = newer("mistral")
    del config["sliding_window"]
    assert read(config).decoder.layers[0].attention.window == 4096
    config = newer("gemma2")
    config["attn_logit_softcapping"] = None
    del config["final_logit_softcapping"]
    spec = read(config).decoder
    assert spec.layers[0].attention.softcap == 0.0
    assert spec.final_softcap == 30.0


EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
OWN_DEFAULTS = ("num_key_value_heads", "max_position_embeddings", *EPSILONS)
OTHERWISE = {  # or its epsilon, or its length, isn't as it stands
    "granite": {"residual_multiplier": 1.0},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", "LlamaConfig"),
        ("mistral", "MistralConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
        ("gemma2", "Gemma2Config"),
        ("gemma3", "Gemma3TextConfig"),
        ("phi3", "Phi3Config"),
        ("olmo2", "Olmo2Config"),
        ("smollm3", "SmolLM3Config"),
        ("olmo3", "Olmo3Config"),
        ("granite", "GraniteConfig"),
        ("gemma", "GemmaConfig"),
        ("cohere", "CohereConfig"),
        ("cohere2", "Cohere2Config"),
        ("glm", "GlmConfig"),
        ("glm4", "Glm4Config"),
        ("starcoder2", "Starcoder2Config"),
        ("exaone4", "Exaone4Config"),
        ("seed-oss", "SeedOssConfig"),
        ("ernie4_5", "Ernie4_5Config"),
        ("ministral", "MinistralConfig"),
        ("ministral3", "Ministral3Config"),
        ("arcee", "ArceeConfig"),
        ("hunyuan", "HunYuanDenseV1Config"),
        ("phi", "PhiConfig"),
        ("stablelm", "StableLmConfig"),
        ("cwm", "CwmConfig"),
        ("vaultgemma", "VaultGemmaConfig"),
        ("nanochat", "NanoChatConfig"),
        ("dots1", "Dots1Config"),
        ("minimax-m2", "MiniMaxM2Config"),
        ("exaone-moe", "ExaoneMoeConfig"),
        ("solar-open", "SolarOpenConfig"),
        ("ernie4_5-moe", "Ernie4_5_MoeConfig"),
        ("hunyuan-moe", "HunYuanMoEV1Config"),
        ("flex-olmo", "FlexOlmoConfig"),
        ("afmoe", "AfmoeConfig"),
        ("mellum", "MellumConfig"),
    ],
)
def test_absent_keys_are_what_they_are_in_transformers(read: Any, name: str, config: str) -> None:
    keys = {**newer(name), "hidden_size": 512, "num_attention_heads": 32}
    keys |= OTHERWISE.get(name, {})
    keys = {key: value for key, value in keys.items() if key not in OWN_DEFAULTS}
    want = getattr(transformers, config)(**keys)
    spec = read(keys).decoder
    assert spec.layers[0].attention.num_kv_heads == want.num_key_value_heads
    (eps,) = (getattr(want, key) for key in EPSILONS if hasattr(want, key))
    assert (spec.max_position, spec.norm.eps) == (want.max_position_embeddings, eps)
    null = read({**keys, "num_key_value_heads": None}).decoder
    assert null.layers[0].attention.num_kv_heads == 32


def test_phi3s_own_original_length(read: Any) -> None:
    """Absent it is 4096, and wins over one in rope_parameters, as in transformers."""
    keys = newer("phi3-long")
    del keys["original_max_position_embeddings"]
    keys["rope_parameters"]["original_max_position_embeddings"] = 32
    keys["max_position_embeddings"] = 16384
    rope = read(keys).decoder.layers[0].attention.rope
    assert (rope.original_max_position, rope.factor) == (4096, 4.0)


def test_gemma3_caps_no_scores(read: Any) -> None:
    with pytest.warns(UserWarning, match=r"attn_logit_softcapping=2\.0, which isn't applied"):
        spec = read({**newer("gemma3"), "attn_logit_softcapping": 2.0}).decoder
    assert spec.layers[0].attention.softcap == 0.0


def test_what_transformers_writes_and_does_not_read(read: Any) -> None:
    """Gemma 3's underscored pattern, and GPT-NeoX's usual names outside of rope_parameters."""
    keys = newer("gemma3")
    del keys["layer_types"]
    keys.pop("sliding_window_pattern", None)
    spec = read({**keys, "_sliding_window_pattern": 2}).decoder
    assert [layer.attention.window for layer in spec.layers] == [16] * 4
    keys = newer("gpt-neox")
    del keys["rope_parameters"]
    both = {"rope_theta": 5.0, "partial_rotary_factor": 1.0}
    rope = read({**keys, **both}).decoder.layers[0].attention.rope
    assert (rope.theta, rope.rotary_dim) == (10_000.0, 8)
    own = {"rotary_emb_base": 77, "rotary_pct": 0.5}
    rope = read({**keys, **both, **own}).decoder.layers[0].attention.rope
    assert (rope.theta, rope.rotary_dim) == (77.0, 16)


def test_a_truncation_that_is_null_is_none(read: Any) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": None}
    keys = {**newer("llama"), "rope_parameters": rope}
    assert read(keys).decoder.layers[0].attention.rope.truncate is False


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "default", "factor": 1.0}}),
        ("gpt2", {"n_ctx": 128}),
        *((name, {"architectures": None}) for name in CASES),
    ],
)
def test_what_changes_nothing(read: Any, name: str, change: dict[str, Any]) -> None:
    """As in transformers, which goes by model_type, and scales nothing up to the model's length."""
    assert read({**newer(name), **change}) == read(newer(name))


def test_phi3s_yarn_is_longrope(read: Any) -> None:
    keys = newer("phi3-long")
    want, scaling = read(keys), keys.pop("rope_parameters")
    del scaling["rope_type"], scaling["rope_theta"]
    share = scaling.pop("partial_rotary_factor")
    old = {"rope_scaling": {"type": "yarn", **scaling}, "partial_rotary_factor": share}
    assert read({**keys, **old}) == want


def test_gemma3_between_the_spellings(read: Any) -> None:
    """Some checkpoints keep the thetas outside and only the scaling inside."""
    config = newer("gemma3")
    want = read(config)
    config["rope_parameters"] = {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDES: None}
    assert read({**config, "rope_theta": 1e6, "rope_local_base_freq": 1e4}) == want
    assert read(config) == want


def test_yarn_takes_every_option(read: Any) -> None:
    config = newer("llama")
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    rope = read(config).decoder.layers[0].attention.rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)
    assert rope.attention_factor == pytest.approx(1.3688879 / 1.1844440)


def _rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **keys}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization": {"bits": 4}}, "only quantization_config is read"),
    ("llama", {"num_local_experts": 8}, "mixtures of experts"),
    ("olmoe", {"num_experts_per_tok": 13}, "13 is more than the 12 experts"),
    ("olmoe", {"num_experts": 1_000_000_000}, "num_experts is beyond 10,000"),
    ("olmoe", {"num_local_experts": 6}, "num_experts 12 and num_local_experts 6 differ"),
    ("qwen3-moe", {"mlp_only_layers": "1"}, "mlp_only_layers must be a list"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
    ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit=6.0"),
    ("qwen3-moe", {"shared_expert_intermediate_size": 512}, "that all tokens share aren't built"),
    ("llama", {"attention_multiplier": 0.0078125}, "attention_multiplier=0.0078125"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
    ("llama", {"alibi": True}, "ALiBi"),
    ("llama", {"rope_interleaved": True}, "interleaved"),
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu'.*'silu'"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"num_attention_heads": 3, "head_dim": None}, "64 is not a multiple"),
    ("llama", {"num_attention_heads": "4"}, "num_attention_heads must be a positive integer: '4'"),
    ("llama", {"vocab_size": 0}, "vocab_size must be a positive integer"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be integers"),
    ("llama", {"vocab_size": None}, "has no 'vocab_size'"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", _rope(rope_type="ntk", factor=2.0), "'ntk' isn't built; default, mrope, linear"),
    ("llama", _rope(rope_type="dynamic"), "has no 'factor'"),
    ("llama", _rope(rope_type="default", factor=2.0), "factor=2.0; built for this family: 1"),
    ("llama", _rope(rope_type="llama3", factor=8.0), "has no 'low_freq_factor'"),
    ("llama", _rope(rope_type="linear"), "has no 'factor'"),
    ("llama", _rope(rope_type="linear", factor=0), "factor must be above 0"),
    (
        "llama",
        _rope(rope_type="default", mrope_section=[8, 8]),
        "mrope_section must be three numbers",
    ),
    ("llama", _rope(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "they differ"),
    ("qwen2", {"layer_types": [FULL, SLIDES, FULL]}, "no sliding_window is in effect"),
    ("qwen2", {"layer_types": [FULL]}, "must name 3 layers"),
    ("qwen2", {"layer_types": [FULL, "chunked_attention", FULL]}, "chunked_attention"),
    ("qwen2", {"use_mrope": True}, "multimodal rotary"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
    ("gemma2", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ("gemma2", {"sliding_window": None}, "no sliding_window is in effect"),
    ("gemma2", {"sliding_window_size": 8}, "sliding_window_size=8"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "nothing reads: rope_theta"),
    ("gemma3", {"rope_scaling": GEMMA3_ROPE[FULL]}, "remove one"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
    ("phi3", _rope(rope_type="linear", factor=2.0), "Phi 3 with a rope of type 'linear'"),
    ("phi3-long", {"num_attention_heads": 2}, "6 short and 6 long factors.*needs 12"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must hold 0 or 1 for 4 layers"),
    ("gpt2", {"activation_function": "silu"}, "activation_function='silu'"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ("gpt2", {"n_head": 5}, "64 is not a multiple of n_head 5"),
    ("gpt-neox", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
    ("gpt-neox", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("olmo2", {"clip_qkv": 8.0}, "clipped"),
    ("llama", {"attention_multiplier": 0.5}, "this multiplier isn't built"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be above 0: 0.0"),
    ("granite", {"logits_scaling": -2.0}, "logits_scaling must be above 0: -2.0"),
    ("granite", {"logits_scaling": 1e300}, "its scale of logits is 1e-300, which isn't above 0"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "nothing reads: rope_theta"),
    ("olmo3", {"sliding_window": None}, "no sliding_window is in effect"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("cohere", {"logit_scale": 0}, "logit_scale must be above 0: 0.0"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block=False"),
    ("cohere2", {"rotary_pct": 0.5}, "rotary_pct=0.5"),
    ("cohere2", {"layer_switch": 2}, "layer_switch=2"),
    ("glm", {"mlp_bias": True}, "mlp_bias=True"),
    ("starcoder2", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
    ("starcoder2", {"hidden_act": "silu"}, "hidden_act='silu'"),
    ("exaone4", {"sliding_window_pattern": "LLX"}, "must be a number of layers or letters L and G"),
    ("exaone4", {"sliding_window_pattern": 0}, "must be a number of layers or letters L and G: 0"),
    ("seed-oss", {"sliding_window": 0, "num_experts": 4}, "mixtures of experts aren't built"),
    ("arcee", {"hidden_act": "silu"}, "hidden_act='silu'; built for this family: 'relu2'"),
    ("lfm2", {"conv_dim": 32}, "asks for conv_dim=32; built for this family: 64"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "No layer attends"),
    ("lfm2", {"full_attn_idxs": [1, 99], "layer_types": None}, "some of the layers 0 to 3"),
    ("lfm2", {"full_attn_idxs": [True], "layer_types": None}, "some of the layers 0 to 3"),
    ("lfm2", {"full_attn_idxs": [0, 3]}, "differ: leave one out"),
    ("lfm2", {"theta": 5.0}, "theta 5.0 and rope_theta 1000000.0"),
    ("lfm2", {"num_heads": 99}, "asks for num_heads=99"),
    ("lfm2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("lfm2-moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "is no size"),
    ("lfm2", {"block_ff_dim": 1}, "block_ff_dim 1 times block_ffn_dim_multiplier 1 is no size"),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", 7]},
        "asks for 7 in layer 3; built",
    ),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "must name 4 layers, not 2"),
    ("lfm2", {"conv_L_cache": 17}, "over 17 tokens isn't built"),
    ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu=False"),
    ("lfm2-moe", {"num_dense_layers": -1}, "num_dense_layers must be a whole number"),
    ("lfm2-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8"),
    ("granite-hybrid", {"layer_types": ["mamba"] * 4}, "No layer attends"),
    ("granite-hybrid", {"layer_types": ["mamba", "attention"]}, "must name 4 layers, not 2"),
    ("granite-hybrid", {"mamba_n_heads": 3}, "3 of mamba_d_head 32 aren't the 128 that"),
    ("granite-hybrid", {"mamba_n_groups": 3}, "of 4 heads in 3 groups with states of 32 isn't"),
    ("granite-hybrid", {"mamba_d_state": 20}, "with states of 20 isn't built"),
    ("granite-hybrid", {"mamba_n_heads": 16, "mamba_d_head": 8}, "heads of 8 dimensions"),
    ("granite-hybrid", {"mamba_d_conv": 17}, "over 17 tokens isn't built"),
    ("granite-hybrid", {"time_step_limit": [0.1, 2.0]}, r"time_step_limit \[0.1, 2.0\]"),
    ("granite-hybrid", {"shared_intermediate_size": 0}, "for no block in their place"),
    ("granite-hybrid", {"position_embedding_type": "alibi"}, "type='alibi'"),
    ("granite-hybrid", {"normalization_function": "layernorm"}, "function='layernorm'"),
    ("granite-hybrid-moe", {"num_experts_per_tok": 7}, "7 is more than the 6 experts"),
    ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("nemotron-h", {"layers_block_type": ["mlp", "mlp"]}, "No layer attends"),
    ("nemotron-h", {"layers_block_type": ["mamba", "mamba"]}, "No layer attends"),
    ("nemotron-h", {"layers_block_type": ["mamba", "attention", "x"]}, "asks for 'x' in layer 2"),
    ("nemotron-h", {"layers_block_type": []}, "says of no block what it is"),
    (
        "nemotron-h",
        {"layers_block_type": None, "hybrid_override_pattern": "M*?"},
        "hybrid_override_pattern asks for '[?]' in layer 2; built: M, [*], -, E",
    ),
    ("nemotron-h", {"layers_block_type": [["mamba"]] * 9}, r"asks for \['mamba'\] in layer 0"),
    ("nemotron-h", {"layers_block_type": "M-M*-"}, "must name .* layers, not 'M-M[*]-'"),
    ("nemotron-h", {"layers_block_type": None}, "says of no block what it is"),
    ("nemotron-h", {"num_hidden_layers": 8}, "must name 8 layers, not 9 layers"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
    ("nemotron-h", {"time_step_limit": [0.1, 2.0]}, r"time_step_limit \[0.1, 2.0\]"),
    ("nemotron-h", {"residual_in_fp32": True}, "residual_in_fp32=True"),
    ("nemotron-h", {"attention_bias": True}, "attention_bias=True"),
    ("nemotron-h", {"attention_head_dim": 32}, "head_dim=24"),
    ("nemotron-h", {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001"),
    ("nemotron-h-moe", {"moe_latent_size": 0}, "moe_latent_size must be a positive integer"),
    ("nemotron-h-moe", {"n_shared_experts": 2}, "n_shared_experts=2"),
    ("nemotron-h-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 can't be chosen"),
    ("bamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
    ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ("bamba", {"attn_rotary_emb": 64}, "attn_rotary_emb=64"),
    ("bamba", {"attn_layer_indices": [9]}, "some of the layers 0 to 3"),
    ("bamba", {"attn_layer_indices": None}, "No layer attends"),
    ("olmo-hybrid", {"linear_key_head_dim": 24}, "linear_num_key_heads 2 of 24 dimensions aren't"),
    ("olmo-hybrid", {"linear_num_key_heads": 3}, "linear_num_value_heads 4 and linear"),
    ("olmo-hybrid", {"layer_types": ["linear_attention"] * 4}, "names linear_attention alone"),
    ("olmo-hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("falcon-h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers must be 2 numbers .* not \[1.0\]"),
    ("falcon-h1", {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "must be 5 numbers above 0"),
    ("falcon-h1", {"key_multiplier": 0.0}, "key_multiplier must be above 0"),
    ("falcon-h1", {"attention_bias": True}, "attention_bias=True"),
    ("falcon-h1", {"projectors_bias": True}, "projectors_bias=True"),
    ("falcon-h1", {"mamba_d_ssm": 96}, "mamba_d_head 16 aren't the 96 that mamba_d_ssm is"),
    ("falcon-h1", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("falcon-h1-normed", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate=True"),
    ("falcon-h1-normed", {"mamba_norm_before_gate": None}, "mamba_norm_before_gate=True"),
    ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act='gelu'; built for this family: 'swish'"),
    ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act='gelu'; built for this family: 'swish'"),
    ("hunyuan", {"use_qk_norm": False}, "use_qk_norm=False"),
    ("hunyuan", {"use_cla": True}, "use_cla=True"),
    ("hunyuan", {"attention_head_dim": 32}, "attention_head_dim=32"),
    ("ernie4_5-moe", {"use_bias": True}, "use_bias=True"),
    ("ernie4_5-moe", {"moe_k": 7}, "moe_k 7 is more than the 6 experts"),
    ("ernie4_5-moe", {"moe_layer_start_index": "1"}, "must be numbers of layers, not '1' and 2"),
    ("nemotron", {"hidden_act": "gelu"}, "hidden_act='gelu'; built for this family: 'relu2'"),
    ("olmo", {"clip_qkv": 8.0}, "clipped queries, keys and values aren't built"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("minimax-m2", {"attn_type_list": [1, 0, 1]}, "others than 3 layers of softmax attention"),
    ("minimax-m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias=False"),
    ("hunyuan-moe", {"moe_topk": [1, 2, 1]}, "moe_topk must say the same of each of 3 layers"),
    ("hunyuan-moe", {"num_shared_expert": 2}, "num_shared_expert=2"),
    ("hunyuan-moe", {"use_cla": True}, "use_cla=True"),
    ("hunyuan-moe", {"use_mla": True}, "use_mla=True"),
    ("exaone-moe", {"num_experts_per_tok": 5}, "5 can't be chosen from topk_group 2"),
    ("solar-open", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("granite-swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta must name 4 layers"),
    ("granite-swa", {"layer_rope_theta": [1.0, -1.0, 1.0, 1.0]}, "must be above 0: -1.0"),
    ("cohere2-moe", {"expert_selection_fn": "topk"}, "expert_selection_fn='topk'"),
    ("afmoe", {"score_func": "softmax"}, "score_func='softmax'"),
    ("afmoe", {"attention_bias": True}, "attention_bias=True"),
    ("nanochat", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("gptj", {"rotary_dim": None}, "has no 'rotary_dim'"),
    ("gptj", {"rotary_dim": 18}, "rotary_dim 18 of a head of 16"),
    ("codegen", {"n_head": 2}, "n_head 2 isn't a multiple of 4"),
    ("falcon", {"alibi": True}, "alibi=True"),
    ("falcon-40b", {"parallel_attn": False}, "which no Falcon has"),
    ("falcon-serial", {"num_kv_heads": 2}, "num_kv_heads 2 isn't num_attention_heads 4"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("llama", {"architectures": 5}, "architectures must be a list of names: 5"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ("llama", {"architectures": [["x"]]}, r"holds \['x'\], which isn't built"),
    ("llama", {"num_hidden_layers": 10**18}, "num_hidden_layers is beyond 10,000"),
    ("gpt2", {"n_layer": 10**18}, "n_layer is beyond 10,000"),
    ("llama", {"head_dim": 10**400}, "a number of config.json is too large or too small"),
    ("llama", {"vocab_size": 10**400}, "its tokens of the vocabulary are a number of 1329 bits"),
    ("llama", {"rms_norm_eps": 10**400}, "a number of config.json is too large or too small"),
    ("llama", {"rms_norm_eps": -1.0}, "its norm's epsilon is -1.0, which isn't above 0"),
    ("gpt2", {"layer_norm_epsilon": 0}, "its norm's epsilon is 0.0, which isn't above 0"),
    ("llama", {"max_position_embeddings": 10**12}, "its positions are 1,000,000,000,000, beyond"),
    ("llama", {"max_position_embeddings": 10**30}, "its positions are a number of 100 bits"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0: 0.0"),
    ("gemma3", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be above 0: -4.0"),
    ("gemma2", {"query_pre_attn_scalar": 5e-324}, r"scale of attention scores is 4\.49.*e\+161"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "its cap of logits is -1.0"),
    ("llama", _rope(rope_type="yarn", factor=8, beta_fast=0), "type 'yarn': .*division by zero"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "by zero"),
    (
        "llama",
        _rope(rope_type="yarn", factor=2, mscale=1, mscale_all_dim=-10 / math.log(2)),
        "mscale_all_dim -14.* divides by 0",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e-300}},
        "rope_theta=1e-300 .*they aren't finite",
    ),
    ("llama", _rope(rope_type="linear", factor=1e308), r"its factor of 1e\+308 is beyond any"),
    ("phi3", _rope(partial_rotary_factor=1e308), r"partial_rotary_factor 1e\+308 of a head"),
    ("gpt-neox", _rope(partial_rotary_factor=-1), "partial_rotary_factor -1.0 of a head"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_not_built_is_refused(
    read: Any, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read({**newer(name), **change})


def test_unread_keys_are_named_in_one_warning(read: Any) -> None:
    config = {**newer("qwen3"), "zeta": 1, "alpha_of_attention": 0.5, "temperature": 0.7}
    with pytest.warns(UserWarning, match=r"'qwen3'.* nothing reads: alpha_of_attention, zeta\."):
        read(config, strict=False)
    with pytest.raises(UnsupportedModelError, match=r"nothing reads: alpha_of_attention, zeta\."):
        read(config)


def test_the_type_of_another_architecture(read: Any) -> None:
    config = {**newer("qwen3"), "model_type": "llama"}
    with pytest.warns(UserWarning, match=r"which is LlamaForCausalLM's\. It is read as Qwen3"):
        assert read(config) == read(newer("qwen3"))
    read({**config, "model_type": "mine"})  # which nobody else has


def test_unknown_architectures(read: Any) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"Did you mean 'Qwen3NextForCausalLM'\?.*Built: "
    ):
        read({"architectures": ["Qwen3NextMoeForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="model_type 'bert'"):
        read({"model_type": "bert"})
    with pytest.raises(UnsupportedModelError, match="isn't built"):
        read({"architectures": [None]})


def test_broken_config_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        read_spec(tmp_path)
    for content, message in (
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: .*digits"),
        (b"[" * 100_000, "not valid JSON: .*recursion"),
        (b"\xff\xfe{}", "not valid JSON"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UnsupportedModelError, match=message):
            read_spec(tmp_path)


SEEING = {
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "Idefics3", "InternVL", "Lfm2Vl", "Llava", "LlavaNext", "Mistral3", "Qwen2VL",
        "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM",
    )
}  # fmt: skip
"""Whose configs are those of `tests/models/seeing.py`."""


READ_FOR_TEXT = {f"Gemma4{kind}ForConditionalGeneration" for kind in ("", "Unified")}
READ_FOR_TEXT |= {"Gemma4UnifiedForCausalLM"}
"""Which `tests/models/test_gemma4.py` has."""
EARLIER = {"Ernie4_5_ForCausalLM"}
"""First names of what transformers calls otherwise now."""


def test_every_family_is_registered() -> None:
    known = SEEING | READ_FOR_TEXT | EARLIER
    assert set(architectures()) == known | {case.model for case in CASES.values()}

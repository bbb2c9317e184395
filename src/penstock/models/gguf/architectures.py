"""Architectures: from GGUF's names and metadata to what a family here reads.

Names are those of the specification ("Standardized tensor names") and of llama.cpp's converters
(github.com/ggml-org/llama.cpp, conversion/), whose changes to values are undone in `source`.
"""

from __future__ import annotations

from functools import partial

from penstock.models.gguf import delta
from penstock.models.gguf.container import Container
from penstock.models.gguf.convolutions import CONVOLUTIONS
from penstock.models.gguf.dense import DENSE
from penstock.models.gguf.gemma4 import GEMMA4
from penstock.models.gguf.mamba import MAMBA
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.mixed import MIXED
from penstock.models.gguf.nemotron import NEMOTRON
from penstock.models.gguf.parts import (
    ATTENTION,
    EXPERTS,
    LAYER,
    MIXTRAL,
    MLP,
    NORMS,
    OUTER,
    QK,
    QK_NORMS,
    SANDWICH,
    SHARED,
    Architecture,
    Config,
    ValueHeads,
    check_scale,
    head_dim_of,
    layers_of,
    rms_model,
    sliding_layers,
    with_biases,
)
from penstock.models.gguf.rope import rope_config, share_of

_SHARE = {  # of a block beside experts
    **{f"ffn_{x}_shexp": f"{LAYER}mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": f"{LAYER}mlp.shared_expert_gate",
}
_GUESSING = {  # a layer's behind the last one
    f"nextn.{x}": f"{LAYER}nextn.{x}"
    for x in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")
}
_LATENTS = {
    "attn_q": f"{LAYER}self_attn.q_proj",
    "attn_q_a": f"{LAYER}self_attn.q_a_proj",
    "attn_q_a_norm": f"{LAYER}self_attn.q_a_layernorm",
    "attn_q_b": f"{LAYER}self_attn.q_b_proj",
    "attn_kv_a_mqa": f"{LAYER}self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": f"{LAYER}self_attn.kv_a_layernorm",
    "attn_kv_b": f"{LAYER}self_attn.kv_b_proj",
    "attn_k_b": f"{LAYER}self_attn.k_b_proj",
    "attn_v_b": f"{LAYER}self_attn.v_b_proj",
    "attn_output": f"{LAYER}self_attn.o_proj",
}
_GPT_OSS = EXPERTS | {
    "ffn_gate_inp": f"{LAYER}mlp.router",
    "attn_sinks": f"{LAYER}self_attn.sinks",
    "attn_norm": f"{LAYER}input_layernorm",
    "post_attention_norm": f"{LAYER}post_attention_layernorm",
}
_LLAMA = OUTER | ATTENTION | MLP | NORMS
_PHI3 = (
    OUTER
    | NORMS
    | {
        "attn_qkv": f"{LAYER}self_attn.qkv_proj",
        "attn_output": f"{LAYER}self_attn.o_proj",
        "ffn_up": f"{LAYER}mlp.gate_up_proj",
        "ffn_down": f"{LAYER}mlp.down_proj",
    }
)
_GPT2 = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output": "lm_head",
    "output_norm": "ln_f",
    "attn_norm": "h.{i}.ln_1",
    "attn_qkv": "h.{i}.attn.c_attn",
    "attn_output": "h.{i}.attn.c_proj",
    "ffn_norm": "h.{i}.ln_2",
    "ffn_up": "h.{i}.mlp.c_fc",
    "ffn_down": "h.{i}.mlp.c_proj",
}
_NEOX_LAYER = "gpt_neox.layers.{i}."
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output": "embed_out",
    "output_norm": "gpt_neox.final_layer_norm",
    "attn_norm": f"{_NEOX_LAYER}input_layernorm",
    "attn_qkv": f"{_NEOX_LAYER}attention.query_key_value",
    "attn_output": f"{_NEOX_LAYER}attention.dense",
    "ffn_norm": f"{_NEOX_LAYER}post_attention_layernorm",
    "ffn_up": f"{_NEOX_LAYER}mlp.dense_h_to_4h",
    "ffn_down": f"{_NEOX_LAYER}mlp.dense_4h_to_h",
}


def _experts(m: Metadata, config: Config) -> Config:
    """What else is said of experts; their number is read of any architecture."""
    config["num_experts_per_tok"] = m.integer(m.own("expert_used_count"))
    return config


def _llama(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "LlamaForCausalLM"))
    m.get(m.own("tensor_data_layout"))  # "Meta AI original pth": what `rotated` undoes
    check_scale(m, config)
    window = m.integer(m.own("attention.sliding_window"), 0)
    if window:  # the same architecture there
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        del config["attention_bias"]
    if m.integer(m.own("expert_count"), 0) and "blk.0.ffn_gate_inp.weight" in c.tensors:
        config["architectures"] = ["MixtralForCausalLM"]
        for name in ("attention_bias", "mlp_bias"):
            config.pop(name, None)
        return _experts(m, config)
    return config


def _qwen2(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Qwen2ForCausalLM")
    check_scale(m, config)
    m.get(m.own("rope.dimension_sections"))  # of pictures: a text's tokens are at one place
    return config


def _qwen3(m: Metadata, c: Container) -> Config:
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        m.get(m.own(key))  # of pictures, too
    config = with_biases(c, rms_model(m, c, "Qwen3ForCausalLM"))
    check_scale(m, config)
    return config


def _qwen2_moe(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Qwen2MoeForCausalLM")
    check_scale(m, config)
    config["num_experts"] = m.integer(m.own("expert_count"))  # as transformers calls it
    inner, chosen = config["intermediate_size"], m.integer(m.own("expert_used_count"))
    each = m.integer(m.own("expert_feed_forward_length"), inner // chosen)
    config["moe_intermediate_size"] = each
    shared = m.integer(m.own("expert_shared_feed_forward_length"), inner)
    config["shared_expert_intermediate_size"] = shared
    config["norm_topk_prob"] = False  # of all that there are; no key says it
    return _experts(m, config)


def _qwen3_moe(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "Qwen3MoeForCausalLM"))
    check_scale(m, config)
    del config["mlp_bias"]
    config["moe_intermediate_size"] = m.integer(m.own("expert_feed_forward_length"))
    config["norm_topk_prob"] = True  # of all that there are; no key says it
    return _experts(m, config)


def _hybrid(m: Metadata, c: Container, architecture: str) -> Config:
    config = rms_model(m, c, architecture, inner=0)  # none where every layer has experts
    check_scale(m, config)
    config |= delta.delta_config(m, c, config)
    return _experts(m, config) if "num_experts" in config else config


def _olmoe(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "OlmoeForCausalLM"))
    check_scale(m, config)
    del config["mlp_bias"]
    return _experts(m, config)


def _gpt_oss(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "GptOssForCausalLM")
    check_scale(m, config)
    inner = m.integer(m.own("expert_feed_forward_length"), config["intermediate_size"])
    config["intermediate_size"] = inner
    config["sliding_window"] = m.integer(m.own("attention.sliding_window"), 0) or None
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False  # as it was trained; no key says it
    else:
        config["rope_parameters"] = {"rope_type": "default"}
    return _experts(m, config)


def _smollm3(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "SmolLM3ForCausalLM"))
    check_scale(m, config)
    return config


def _phi3(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Phi3ForCausalLM")
    check_scale(m, config)
    config["sliding_window"] = m.integer(m.own("attention.sliding_window"), 0) or None
    return config


def _routed(m: Metadata, config: Config) -> Config:
    """What is said of experts that DeepSeek's and GLM's routers choose from."""
    guesses = m.integer(m.own("nextn_predict_layers"), 0)
    config["num_hidden_layers"] -= guesses
    config |= {
        "n_routed_experts": m.integer(m.own("expert_count")),
        "num_nextn_predict_layers": guesses,
        "first_k_dense_replace": m.integer(m.own("leading_dense_block_count"), 0),
        "moe_intermediate_size": m.integer(m.own("expert_feed_forward_length")),
        "n_shared_experts": m.integer(m.own("expert_shared_count"), 0),
        "routed_scaling_factor": m.number(m.own("expert_weights_scale"), 1.0) or 1.0,
        "norm_topk_prob": m.flag(m.own("expert_weights_norm"), False),
    }
    groups = 8 if (config["num_hidden_layers"], config["n_routed_experts"]) == _LARGE else 1
    config |= {
        "n_group": m.integer(m.own("expert_group_count"), groups) or 1,
        "topk_group": m.integer(m.own("expert_group_used_count"), max(groups // 2, 1)) or 1,
    }
    return _experts(m, config)


_LARGE = (61, 256)
"""Layers and experts of DeepSeek-V3 and R1, whose first files don't name their eight groups."""
_SOFTMAX, _SIGMOID = 1, 2
_FLASH = (154_880, (47, 48))
"""Vocabulary and layers of GLM-4.7-Flash, whose first files don't say how experts are chosen."""


def _deepseek2(m: Metadata, c: Container) -> Config:
    """DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash; files with `attn_kv_b` whole are older ones."""
    turning, rank = (
        m.integer(m.own("rope.dimension_count")),
        m.integer(m.own("attention.kv_lora_rank")),
    )
    whole = "blk.0.attn_kv_b.weight" in c.tensors
    lengths = [
        m.integer(m.own(f"attention.{x}_length{'' if whole else '_mla'}")) for x in ("key", "value")
    ]
    for name in ("key_length", "value_length"):
        m.get(m.own(f"attention.{name}"))  # of what is cached
    if lengths[0] <= turning:
        raise m.fail(
            m.own("rope.dimension_count"), turning, f"below the key's length, {lengths[0]}"
        )
    heads, layers = m.integer(m.own("attention.head_count")), layers_of(m, c)
    m.get(m.own("attention.head_count_kv"))
    config: Config = {
        "hidden_size": m.integer(m.own("embedding_length")),
        "intermediate_size": m.integer(m.own("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": m.integer(m.own("attention.q_lora_rank"), 0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": lengths[0] - turning,
        "v_head_dim": lengths[1],
        "rms_norm_eps": m.number(m.own("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": m.integer(m.own("context_length")),
        **rope_config(m, c, turning),
    }
    sharp = 10 * m.number(m.own("rope.scaling.yarn_log_multiplier"), 0.0)
    if sharp and "rope_scaling" in config:
        both = round(sharp, 6)  # a float32 of a tenth; of all that there are mscale is the same
        config["rope_scaling"] |= {"mscale": both, "mscale_all_dim": both}
    flash = (m.integer(m.own("vocab_size"), 0), layers)
    default = _SIGMOID if flash[0] == _FLASH[0] and flash[1] in _FLASH[1] else _SOFTMAX
    gate = m.integer(m.own("expert_gating_func"), default) or default
    if gate not in (_SOFTMAX, _SIGMOID):
        raise m.fail(m.own("expert_gating_func"), gate, "1 (softmax) or 2 (sigmoid)")
    config = _routed(m, config)
    if gate == _SIGMOID:
        return config | {"architectures": ["DeepseekV3ForCausalLM"]}
    limited = config["n_group"] > 1
    config["topk_method"] = "group_limited_greedy" if limited else "greedy"
    return config | {"architectures": ["DeepseekV2ForCausalLM"]}


def _glm4_moe(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Glm4MoeForCausalLM")
    check_scale(m, config)
    gate = m.integer(m.own("expert_gating_func"), _SIGMOID)
    if gate != _SIGMOID:
        raise m.fail(m.own("expert_gating_func"), gate, "2 (sigmoid)")
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in c.tensors
    return _routed(m, config)


def _dots1(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Dots1ForCausalLM")
    check_scale(m, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    config["sliding_window"] = m.integer(m.own("attention.sliding_window"), 0) or None
    gate = m.integer(m.own("expert_gating_func"), _SIGMOID)
    if gate != _SIGMOID:
        raise m.fail(m.own("expert_gating_func"), gate, "2 (sigmoid)")
    config = _routed(m, config)
    del config["num_nextn_predict_layers"]  # it has none
    return config


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by hidden size ÷ heads: a file doesn't say."""


def _gemma(m: Metadata, c: Container, architecture: str, period: int) -> Config:
    config = rms_model(m, c, architecture)
    layers = config["num_hidden_layers"]
    largest = layers == _LARGEST_GEMMA[m.architecture]
    per_head = config["hidden_size"] / config["num_attention_heads"]
    scale = m.number(m.own("attention.scale"), 0.0)
    if scale and not 1e-18 < scale < 1e18:  # its square is a float, too
        raise m.fail(m.own("attention.scale"), scale, "above 0, and a scale of scores")
    usual = per_head if largest else config["head_dim"]
    scalar = scale**-2 if scale else usual
    whole = round(scalar)  # as configs have it; a float32 scale gives it back but for its rounding
    config["query_pre_attn_scalar"] = whole if abs(scalar - whole) < 1e-5 * scalar else scalar
    window = m.integer(m.own("attention.sliding_window"), 0)
    config["layer_types"] = sliding_layers(m, layers, window, period)
    config["sliding_window"] = window or None
    for theirs in ("attn_logit_softcapping", "final_logit_softcapping"):
        default = {"gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}}
        cap = m.number(m.own(theirs), default.get(m.architecture, {}).get(theirs, 0.0))
        config[theirs] = cap or None
    return config


def _gemma2(m: Metadata, c: Container) -> Config:
    return _gemma(m, c, "Gemma2ForCausalLM", 2)


def _gemma3(m: Metadata, c: Container) -> Config:
    config = _gemma(m, c, "Gemma3ForCausalLM", 6)
    if m.get(m.own("rope.freq_base")) is None:
        config["rope_theta"] = 1_000_000.0
    config["rope_local_base_freq"] = m.number(m.own("rope.freq_base_swa"), 10_000.0)
    return config


def _gpt2(m: Metadata, c: Container) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": m.integer(m.own("embedding_length")),
        "n_head": m.integer(m.own("attention.head_count")),
        "n_layer": layers_of(m, c),
        "n_positions": m.integer(m.own("context_length")),
        "n_inner": m.integer(m.own("feed_forward_length")),
        "layer_norm_epsilon": m.number(m.own("attention.layer_norm_epsilon")),
    }


def _gpt_neox(m: Metadata, c: Container) -> Config:
    dim = head_dim_of(m)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": m.integer(m.own("embedding_length")),
        "intermediate_size": m.integer(m.own("feed_forward_length")),
        "num_hidden_layers": layers_of(m, c),
        "num_attention_heads": m.integer(m.own("attention.head_count")),
        "layer_norm_eps": m.number(m.own("attention.layer_norm_epsilon")),
        "max_position_embeddings": m.integer(m.own("context_length")),
        "rotary_emb_base": m.number(m.own("rope.freq_base"), 10_000.0),
        "rotary_pct": share_of(m.integer(m.own("rope.dimension_count"), dim), dim),
        "use_parallel_residual": m.flag(m.own("use_parallel_residual"), True),
    }


def _delta_rule(
    architecture: str, names: dict[str, str], value_heads: ValueHeads = "in turns"
) -> Architecture:
    names = OUTER | ATTENTION | QK_NORMS | NORMS | delta.NAMES | names
    read = partial(_hybrid, architecture=architecture)
    return Architecture(read, names, norm_shift=1.0, value_heads=value_heads)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, _LLAMA | MIXTRAL, rotated=QK),
    "qwen2": Architecture(_qwen2, _LLAMA),
    "qwen3": Architecture(_qwen3, _LLAMA | QK_NORMS),
    "qwen2vl": Architecture(_qwen2, _LLAMA),
    "qwen3vl": Architecture(_qwen3, _LLAMA | QK_NORMS),
    "qwen2moe": Architecture(_qwen2_moe, OUTER | ATTENTION | NORMS | EXPERTS | _SHARE),
    "qwen3moe": Architecture(_qwen3_moe, OUTER | ATTENTION | QK_NORMS | NORMS | EXPERTS),
    "qwen35": _delta_rule("Qwen3_5ForCausalLM", MLP),
    "qwen35moe": _delta_rule("Qwen3_5MoeForCausalLM", EXPERTS | _SHARE),
    "qwen3next": _delta_rule("Qwen3NextForCausalLM", EXPERTS | _SHARE, value_heads="by key head"),
    "olmoe": Architecture(_olmoe, OUTER | ATTENTION | QK_NORMS | NORMS | EXPERTS),
    "deepseek2": Architecture(
        _deepseek2,
        OUTER | _LATENTS | MLP | NORMS | EXPERTS | SHARED | _GUESSING,
    ),
    "glm4moe": Architecture(
        _glm4_moe,
        OUTER
        | ATTENTION
        | QK_NORMS
        | MLP
        | NORMS
        | {"post_attention_norm": f"{LAYER}post_attention_layernorm"}
        | EXPERTS
        | SHARED
        | _GUESSING,
    ),
    "dots1": Architecture(_dots1, OUTER | ATTENTION | QK_NORMS | MLP | NORMS | EXPERTS | SHARED),
    "gpt-oss": Architecture(_gpt_oss, OUTER | ATTENTION | _GPT_OSS),
    "smollm3": Architecture(_smollm3, _LLAMA, rotated=QK),
    "gemma2": Architecture(_gemma2, OUTER | ATTENTION | MLP | SANDWICH, norm_shift=1.0),
    "gemma3": Architecture(_gemma3, OUTER | ATTENTION | MLP | SANDWICH | QK_NORMS, norm_shift=1.0),
    "phi3": Architecture(_phi3, _PHI3),
    "gpt2": Architecture(
        _gpt2, _GPT2, transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    ),
    "gptneox": Architecture(_gpt_neox, _GPT_NEOX, by_head=("attn_qkv",)),
    **CONVOLUTIONS,
    **DENSE,
    **GEMMA4,
    **MAMBA,
    **MIXED,
    **NEMOTRON,
}
"""Built architectures by `general.architecture`."""

"""Architectures of dense models beside Llama's kin: what a family here reads of each.

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import (
    ATTENTION,
    LAYER,
    MLP,
    NORMS,
    OUTER,
    QK,
    QK_NORMS,
    SANDWICH,
    Architecture,
    Config,
    check_scale,
    rms_model,
    sliding_layers,
    usual_model,
    with_biases,
)

_POST_NORMS = {name: at for name, at in SANDWICH.items() if name.startswith("post_")}
_ONE_NORM = {"attn_norm": NORMS["attn_norm"]}
_TWO_MATRICES = {f"ffn_{x}": f"{LAYER}mlp.{at}" for x, at in (("up", "c_fc"), ("down", "c_proj"))}
_HUNYUAN_NORMS = {f"attn_{x[0]}_norm": f"{LAYER}self_attn.{x}_layernorm" for x in ("query", "key")}
_GLM4 = {
    "ffn_up": f"{LAYER}mlp.gate_up_proj",
    "ffn_down": f"{LAYER}mlp.down_proj",
    "post_attention_norm": f"{LAYER}post_self_attn_layernorm",
    "post_ffw_norm": f"{LAYER}post_mlp_layernorm",
}
_PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_output": f"{LAYER}self_attn.dense",
    "ffn_up": f"{LAYER}mlp.fc1",
    "ffn_down": f"{LAYER}mlp.fc2",
}


def granite_config(
    m: Metadata,
    c: Container,
    architecture: str = "GraniteForCausalLM",
    kv_heads: int | None = None,
) -> Config:
    """Granite's; what scales embeddings and residuals is read of any architecture. kv_heads: as
    `usual_model` takes them.
    """
    config = with_biases(c, rms_model(m, c, architecture, kv_heads=kv_heads))
    usual = config["head_dim"] ** -0.5
    config["attention_multiplier"] = m.number(m.own("attention.scale"), 0.0) or usual
    config["logits_scaling"] = m.number(m.own("logit_scale"), 1.0) or 1.0
    if m.architecture in ("granite", "granitemoe"):  # Granite 4 without states or experts
        for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
            m.get(m.own(f"ssm.{key}"))
        if not m.integer(m.own("expert_count"), 0):
            m.get(m.own("expert_shared_feed_forward_length"))
    return config


def _olmo2(m: Metadata, c: Container) -> Config:
    """With a window it is an OLMo 3."""
    window = m.integer(m.own("attention.sliding_window"), 0)
    config = with_biases(c, rms_model(m, c, f"Olmo{3 if window else 2}ForCausalLM"))
    check_scale(m, config)
    if window:
        layers = config["num_hidden_layers"]
        config["layer_types"] = sliding_layers(m, layers, window, 4)
        config["sliding_window"] = window
        theta = {"rope_theta": config.pop("rope_theta")}  # scaled where a layer sees everything
        scaling = config.pop("rope_scaling", {"rope_type": "default"})
        config["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default"} | theta,
            "full_attention": scaling | theta,
        }
    return config


def _arcee(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "ArceeForCausalLM"))
    check_scale(m, config)
    return config


def _gemma(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "GemmaForCausalLM")
    check_scale(m, config)
    return config


def _command_r(m: Metadata, c: Container) -> Config:
    config = _layer_norms(m, c, "CohereForCausalLM")
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in c.tensors
    config["logit_scale"] = m.number(m.own("logit_scale"), 1.0) or 1.0
    return config


def _cohere2(m: Metadata, c: Container) -> Config:
    config = _layer_norms(m, c, "Cohere2ForCausalLM")
    config["logit_scale"] = m.number(m.own("logit_scale"), 1.0) or 1.0
    window, layers = m.integer(m.own("attention.sliding_window"), 0), config["num_hidden_layers"]
    config["layer_types"] = sliding_layers(m, layers, window, 4)
    config["sliding_window"] = window or None
    return config


def _hunyuan(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "HunYuanDenseV1ForCausalLM")
    check_scale(m, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    return config


def _glm4(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Glm4ForCausalLM")
    check_scale(m, config)
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    return config


def _starcoder2(m: Metadata, c: Container) -> Config:
    config = usual_model(m, c, "Starcoder2ForCausalLM")
    check_scale(m, config)
    config["norm_epsilon"] = m.number(m.own("attention.layer_norm_epsilon"))
    config["use_bias"] = "blk.0.attn_q.bias" in c.tensors
    config["sliding_window"] = m.integer(m.own("attention.sliding_window"), 0) or None
    return config


def _exaone4(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Exaone4ForCausalLM")
    check_scale(m, config)
    window = m.integer(m.own("attention.sliding_window"), 0)
    config["layer_types"] = sliding_layers(m, config["num_hidden_layers"], window, 4)
    config["sliding_window"] = window or None
    return config


def _seed_oss(m: Metadata, c: Container) -> Config:
    config = with_biases(c, rms_model(m, c, "SeedOssForCausalLM"))
    check_scale(m, config)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in c.tensors
    return config


def _ernie4_5(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Ernie4_5ForCausalLM")
    check_scale(m, config)
    config["use_bias"] = "blk.0.attn_q.bias" in c.tensors
    return config


def _mistral3(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "Ministral3ForCausalLM")
    check_scale(m, config)
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    sharp = m.number(m.own("rope.scaling.yarn_log_multiplier"), 0.0)
    if sharp and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": sharp, "mscale_all_dim": sharp}
    beta = m.number(m.own("attention.temperature_scale"), 0.0)
    if beta:
        scaling["llama_4_scaling_beta"] = beta
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta")}
    config["sliding_window"] = m.integer(m.own("attention.sliding_window"), 0) or None
    return config


def _stablelm(m: Metadata, c: Container) -> Config:
    config = _layer_norms(m, c, "StableLmForCausalLM")
    del config["attention_bias"]
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in c.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in c.tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in c.tensors
    m.get(m.own("use_parallel_residual"))  # what the tensors say anyway
    return config


def _phi2(m: Metadata, c: Container) -> Config:
    config = _layer_norms(m, c, "PhiForCausalLM")
    del config["attention_bias"]
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    return config


def _nemotron(m: Metadata, c: Container) -> Config:
    config = with_biases(c, usual_model(m, c, "NemotronForCausalLM"))
    check_scale(m, config)
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    config["norm_eps"] = m.number(m.own("attention.layer_norm_epsilon"))
    return config


def _olmo(m: Metadata, c: Container) -> Config:
    """Its norms' epsilon is 1e-5 wherever they are; a file that clips queries says so itself."""
    config = usual_model(m, c, "OlmoForCausalLM")
    check_scale(m, config)
    eps = m.number(m.own("attention.layer_norm_epsilon"), 1e-5)
    if abs(eps - 1e-5) > 1e-9:
        raise m.fail(m.own("attention.layer_norm_epsilon"), eps, "1e-05")
    return config


def _layer_norms(m: Metadata, c: Container, architecture: str) -> Config:
    """What Cohere's and others' models have in common."""
    config = usual_model(m, c, architecture)
    check_scale(m, config)
    config["layer_norm_eps"] = m.number(m.own("attention.layer_norm_epsilon"))
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    return config


_USUAL = OUTER | ATTENTION | MLP | NORMS
DENSE: dict[str, Architecture] = {
    "granite": Architecture(granite_config, _USUAL, rotated=QK),
    "olmo2": Architecture(_olmo2, OUTER | ATTENTION | MLP | QK_NORMS | _POST_NORMS),
    "arcee": Architecture(_arcee, _USUAL, rotated=QK),
    "gemma": Architecture(_gemma, _USUAL, norm_shift=1.0),
    "command-r": Architecture(_command_r, OUTER | ATTENTION | MLP | _ONE_NORM),
    "cohere2": Architecture(_cohere2, OUTER | ATTENTION | MLP | _ONE_NORM),
    "hunyuan-dense": Architecture(_hunyuan, _USUAL | _HUNYUAN_NORMS),
    "glm4": Architecture(_glm4, OUTER | ATTENTION | NORMS | _GLM4),
    "starcoder2": Architecture(_starcoder2, OUTER | ATTENTION | NORMS | _TWO_MATRICES),
    "exaone4": Architecture(_exaone4, OUTER | ATTENTION | MLP | QK_NORMS | _POST_NORMS),
    "seed_oss": Architecture(
        _seed_oss,
        OUTER
        | ATTENTION
        | MLP
        | _ONE_NORM
        | {"post_attention_norm": f"{LAYER}post_attention_layernorm"},
    ),
    "ernie4_5": Architecture(_ernie4_5, _USUAL),
    "mistral3": Architecture(_mistral3, _USUAL, rotated=QK),
    "stablelm": Architecture(_stablelm, _USUAL),
    "nemotron": Architecture(_nemotron, _USUAL, norm_shift=1.0),
    "olmo": Architecture(_olmo, OUTER | ATTENTION | MLP, rotated=QK),
    "phi2": Architecture(_phi2, OUTER | ATTENTION | _ONE_NORM | _PHI2),
}
"""By `general.architecture`."""

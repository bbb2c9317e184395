"""LFM2 from GGUF: layers with short convolutions (`ops.short_conv`), with experts or without.

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import (
    ATTENTION,
    LAYER,
    OUTER,
    Architecture,
    Config,
    check_scale,
    heads_by_layer,
    rms_model,
)

_PARTS = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
_NAMES = (
    OUTER
    | ATTENTION
    | {
        "token_embd_norm": "model.embedding_norm",  # behind the last layer, all the same
        "output_norm": "model.embedding_norm",
        "attn_norm": f"{LAYER}operator_norm",
        "attn_q_norm": f"{LAYER}self_attn.q_layernorm",
        "attn_k_norm": f"{LAYER}self_attn.k_layernorm",
        "attn_output": f"{LAYER}self_attn.out_proj",
        "ffn_norm": f"{LAYER}ffn_norm",
        "shortconv.conv": f"{LAYER}conv.conv",
        "shortconv.in_proj": f"{LAYER}conv.in_proj",
        "shortconv.out_proj": f"{LAYER}conv.out_proj",
    }
    | {f"ffn_{x}": f"{LAYER}feed_forward.{w}" for x, w in _PARTS}
)
_EXPERTS = {f"ffn_{x}_exps": f"{LAYER}feed_forward.experts.{{e}}.{w}" for x, w in _PARTS} | {
    "ffn_gate_inp": f"{LAYER}feed_forward.gate",
    "exp_probs_b": f"{LAYER}feed_forward.expert_bias",
}
_SIGMOID = 2


def _lfm2(m: Metadata, c: Container) -> Config:
    """Layers without heads of keys have convolutions."""
    each = heads_by_layer(m, c, "convolutions")
    config = rms_model(m, c, "Lfm2ForCausalLM", kv_heads=max(each))
    check_scale(m, config)
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["layer_types"] = ["full_attention" if count else "conv" for count in each]
    config["conv_L_cache"] = m.integer(m.own("shortconv.l_cache"))
    config["conv_bias"] = any(name.endswith(".shortconv.conv.bias") for name in c.tensors)
    config["block_auto_adjust_ff_dim"] = False  # it is said as it is
    window = m.integer(m.own("attention.sliding_window"), 0)
    if window:
        raise m.fail(m.own("attention.sliding_window"), window, "0: windows aren't built for it")
    return config


def _lfm2_moe(m: Metadata, c: Container) -> Config:
    config = _lfm2(m, c)
    del config["block_auto_adjust_ff_dim"]
    gate = m.integer(m.own("expert_gating_func"), _SIGMOID)
    if gate != _SIGMOID:
        raise m.fail(m.own("expert_gating_func"), gate, "2 (sigmoid)")
    return config | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": m.integer(m.own("expert_count")),
        "num_experts_per_tok": m.integer(m.own("expert_used_count")),
        "moe_intermediate_size": m.integer(m.own("expert_feed_forward_length")),
        "num_dense_layers": m.integer(m.own("leading_dense_block_count"), 0),
        "routed_scaling_factor": m.number(m.own("expert_weights_scale"), 1.0) or 1.0,
        "norm_topk_prob": True,  # of all that there are; no key says it
        "use_expert_bias": any(".exp_probs_b" in name for name in c.tensors),
    }


CONVOLUTIONS: dict[str, Architecture] = {
    "lfm2": Architecture(_lfm2, _NAMES),
    "lfm2moe": Architecture(_lfm2_moe, _NAMES | _EXPERTS),
}
"""Built architectures with short convolutions."""

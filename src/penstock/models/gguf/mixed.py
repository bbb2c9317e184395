"""Architectures of models with experts that came later: what a family here reads of each.

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import (
    ATTENTION,
    EXPERTS,
    LAYER,
    MIXTRAL,
    MLP,
    NORMS,
    OUTER,
    QK_NORMS,
    SHARED,
    Architecture,
    Config,
    check_scale,
    rms_model,
)

_SOFTMAX, _SIGMOID = 1, 2
_ERNIE = {"exp_probs_b": f"{LAYER}mlp.moe_statics.e_score_correction_bias"}
_MINIMAX = {"exp_probs_b": f"{LAYER}block_sparse_moe.e_score_correction_bias"}
_HUNYUAN = {
    **{f"ffn_{x}_shexp": f"{LAYER}mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
    **{f"attn_{x[0]}_norm": f"{LAYER}self_attn.{x}_layernorm" for x in ("query", "key")},
    "ffn_gate_inp": f"{LAYER}mlp.gate.wg",
}


def _check_choice(m: Metadata, built: int) -> None:
    """How experts are chosen, where a file says it."""
    gate = m.integer(m.own("expert_gating_func"), built) or built
    if gate != built:
        name = "1 (softmax)" if built == _SOFTMAX else "2 (sigmoid)"
        raise m.fail(m.own("expert_gating_func"), gate, name)


def _ernie4_5(m: Metadata, c: Container) -> Config:
    """All layers behind the leading ones mix, or every so many; a file doesn't say where that ends.
    What it says of the shared block's size follows from other numbers.
    """
    config = rms_model(m, c, "Ernie4_5_MoeForCausalLM")
    check_scale(m, config)
    _check_choice(m, _SOFTMAX)
    m.get(m.own("expert_shared_feed_forward_length"))
    return config | {
        "use_bias": "blk.0.attn_q.bias" in c.tensors,
        "moe_num_experts": m.integer(m.own("expert_count")),
        "moe_k": m.integer(m.own("expert_used_count")),
        "moe_intermediate_size": m.integer(m.own("expert_feed_forward_length")),
        "moe_num_shared_experts": m.integer(m.own("expert_shared_count"), 0),
        "moe_layer_start_index": m.integer(m.own("leading_dense_block_count"), 0),
        "moe_layer_interval": m.integer(m.own("interleave_moe_layer_step"), 1) or 1,
    }


def _minimax_m2(m: Metadata, c: Container) -> Config:
    config = rms_model(m, c, "MiniMaxM2ForCausalLM")
    check_scale(m, config)
    _check_choice(m, _SIGMOID)
    inner = m.integer(m.own("expert_feed_forward_length"), config["intermediate_size"])
    config["intermediate_size"] = inner
    config["num_experts_per_tok"] = m.integer(m.own("expert_used_count"))
    return config


def _hunyuan(m: Metadata, c: Container) -> Config:
    """The block beside experts is as wide as they are; its alpha is in the base of the rotation."""
    config = rms_model(m, c, "HunYuanMoEV1ForCausalLM")
    check_scale(m, config)
    _check_choice(m, _SOFTMAX)
    inner = m.integer(m.own("expert_feed_forward_length"), config["intermediate_size"])
    shared = m.integer(m.own("expert_shared_feed_forward_length"), inner)
    if shared != inner:
        raise m.fail(m.own("expert_shared_feed_forward_length"), shared, f"the experts', {inner}")
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in c.tensors,
        "intermediate_size": inner,
        "num_experts": m.integer(m.own("expert_count")),
        "moe_topk": m.integer(m.own("expert_used_count")),
        "num_shared_expert": m.integer(m.own("expert_shared_count"), 1),
    }


MIXED: dict[str, Architecture] = {
    "ernie4_5-moe": Architecture(
        _ernie4_5, OUTER | ATTENTION | MLP | NORMS | EXPERTS | SHARED | _ERNIE
    ),
    "minimax-m2": Architecture(
        _minimax_m2, OUTER | ATTENTION | QK_NORMS | NORMS | MIXTRAL | _MINIMAX
    ),
    "hunyuan-moe": Architecture(_hunyuan, OUTER | ATTENTION | NORMS | EXPERTS | _HUNYUAN),
}
"""By `general.architecture`."""

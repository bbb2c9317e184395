"""Gemma 4 from GGUF: what differs by the kind of layer, inputs of layers, and experts.

Names and values are those of llama.cpp's converter (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import (
    ATTENTION,
    LAYER,
    MLP,
    OUTER,
    QK_NORMS,
    SANDWICH,
    Architecture,
    Config,
    layers_of,
    sliding_layers,
)
from penstock.models.gguf.rope import proportional_config

_SLIDES, _WHOLE = "sliding_attention", "full_attention"
_TABLE = "per_layer_token_embd"
_INPUTS = {
    _TABLE: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": f"{LAYER}per_layer_input_gate",
    "proj": f"{LAYER}per_layer_projection",
    "post_norm": f"{LAYER}post_per_layer_input_norm",
}
_EXPERTS = {
    **{f"ffn_{x}_exps": f"{LAYER}experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_up_exps": f"{LAYER}experts.{{e}}.gate_up_proj",
    "ffn_gate_inp": f"{LAYER}router.proj",
    "ffn_gate_inp.scale": f"{LAYER}router.scale",
    "ffn_down_exps.scale": f"{LAYER}router.per_expert_scale",
    "pre_ffw_norm_2": f"{LAYER}pre_feedforward_layernorm_2",
    "post_ffw_norm_1": f"{LAYER}post_feedforward_layernorm_1",
    "post_ffw_norm_2": f"{LAYER}post_feedforward_layernorm_2",
}


def _gemma4(m: Metadata, c: Container) -> Config:
    layers, window = layers_of(m, c), m.integer(m.own("attention.sliding_window"))
    types = sliding_layers(m, layers, window, 6)
    shared = m.integer(m.own("attention.shared_kv_layers"), 0)
    local, whole = (_head_dim(m, end) for end in ("_swa", ""))
    inner, doubled = _widths(m, layers, shared)
    inputs = m.integer(m.own("embedding_length_per_layer_input"), 0)
    table = c.tensors.get(f"{_TABLE}.weight")
    if inputs and table is None:
        raise m.fail(m.own("embedding_length_per_layer_input"), inputs, f"0 without {_TABLE}")
    scale = m.number(m.own("attention.scale"), 1.0)
    if scale not in (0.0, 1.0):
        raise m.fail(m.own("attention.scale"), scale, "1")
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": m.integer(m.own("embedding_length")),
        "intermediate_size": inner,
        "use_double_wide_mlp": doubled,
        "num_hidden_layers": layers,
        "num_attention_heads": m.integer(m.own("attention.head_count")),
        **_kv_heads(m, c, types, shared),
        "num_kv_shared_layers": shared,
        "head_dim": local,
        "global_head_dim": whole,
        "layer_types": types,
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in c.tensors,
        "hidden_size_per_layer_input": inputs,
        **({"vocab_size_per_layer_input": table.shape[0]} if inputs and table else {}),
        **_experts(m),
        "rms_norm_eps": m.number(m.own("attention.layer_norm_rms_epsilon")),
        "final_logit_softcapping": m.number(m.own("final_logit_softcapping"), 0.0) or None,
        "max_position_embeddings": m.integer(m.own("context_length")),
        "use_bidirectional_attention": None if m.flag(m.own("attention.causal"), True) else "all",
        "rope_parameters": proportional_config(m, c, local, whole),
    }


def _head_dim(m: Metadata, end: str) -> int:
    """Of keys and of values, of one kind of layers."""
    key, value = (m.own(f"attention.{x}_length{end}") for x in ("key", "value"))
    dim = m.integer(key)
    if m.integer(value, dim) != dim:
        raise m.fail(value, "another", f"the key's length, {dim}")
    return dim


def _kv_heads(m: Metadata, c: Container, types: list[str], shared: int) -> Config:
    """Heads of keys of each kind of layers, and whether those that see everything have matrices
    of values.
    """
    key = m.own("attention.head_count_kv")
    given = m.get(key)
    each = given if isinstance(given, list) else [given] * len(types)
    found = {
        kind: {count for count, own in zip(each, types, strict=False) if own == kind}
        for kind in (_SLIDES, _WHOLE)
    }
    heads = set(each)
    if len(each) != len(types) or not all(type(x) is int and x > 0 for x in heads):
        raise m.fail(key, given, f"a whole number above 0, or one for each of {len(types)} layers")
    if any(len(counts) > 1 for counts in found.values()):
        raise m.fail(key, given, "the same for all layers that slide, and for all others")
    (whole,) = found[_WHOLE] or heads
    (local,) = found[_SLIDES] or heads
    own = [i for i, kind in enumerate(types[: len(types) - shared]) if kind == _WHOLE]
    same = bool(own) and not any(f"blk.{i}.attn_v.weight" in c.tensors for i in own)
    if whole != local and not same:
        raise m.fail(key, given, "the same for every layer where all have matrices of values")
    more = {"num_global_key_value_heads": whole} if same else {}
    return {"num_key_value_heads": local, "attention_k_eq_v": same, **more}


def _widths(m: Metadata, layers: int, shared: int) -> tuple[int, bool]:
    """Of the MLP, and whether it is twice that in layers that read another's keys."""
    key = m.own("feed_forward_length")
    given = m.get(key)
    if not isinstance(given, list) or len(set(given)) == 1:
        return m.integer(key), False
    if given != given[:1] * (layers - shared) + [2 * given[0]] * shared:
        raise m.fail(key, given, f"one width, or twice that in the last {shared} of {layers}")
    return int(given[0]), True


def _experts(m: Metadata) -> Config:
    """What is said of them, where there are some."""
    count, chosen = (m.integer(m.own(f"expert_{x}"), 0) for x in ("count", "used_count"))
    size = m.integer(m.own("expert_feed_forward_length"), 0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": chosen,
        "moe_intermediate_size": size,
    }


GEMMA4: dict[str, Architecture] = {
    "gemma4": Architecture(
        _gemma4,
        OUTER
        | ATTENTION
        | QK_NORMS
        | MLP
        | SANDWICH
        | _INPUTS
        | _EXPERTS
        | {"layer_output_scale": f"{LAYER}layer_scalar"},
    ),
}
"""By `general.architecture`."""

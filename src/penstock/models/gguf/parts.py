"""What readers of GGUF's architectures share: names of tensors, and the usual metadata.

Names are those of the specification ("Standardized tensor names").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import UnsupportedModelError
from penstock.models.gguf.container import Container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.rope import rope_config

LAYER = "model.layers.{i}."
OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
ATTENTION = {f"attn_{x}": f"{LAYER}self_attn.{x}_proj" for x in "qkv"} | {
    "attn_output": f"{LAYER}self_attn.o_proj"
}
MLP = {f"ffn_{x}": f"{LAYER}mlp.{x}_proj" for x in ("gate", "up", "down")}
NORMS = {
    "attn_norm": f"{LAYER}input_layernorm",
    "ffn_norm": f"{LAYER}post_attention_layernorm",
}
SANDWICH = {
    "attn_norm": f"{LAYER}input_layernorm",
    "post_attention_norm": f"{LAYER}post_attention_layernorm",
    "ffn_norm": f"{LAYER}pre_feedforward_layernorm",
    "post_ffw_norm": f"{LAYER}post_feedforward_layernorm",
}
EXPERTS = {f"ffn_{x}_exps": f"{LAYER}mlp.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")}
EXPERTS["ffn_gate_inp"] = f"{LAYER}mlp.gate"
SHARED = {
    **{f"ffn_{x}_shexp": f"{LAYER}mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    "exp_probs_b": f"{LAYER}mlp.gate.e_score_correction_bias",
}
MIXTRAL = {
    f"ffn_{x}_exps": f"{LAYER}block_sparse_moe.experts.{{e}}.{w}"
    for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
MIXTRAL["ffn_gate_inp"] = f"{LAYER}block_sparse_moe.gate"
QK_NORMS = {f"attn_{x}_norm": f"{LAYER}self_attn.{x}_norm" for x in "qk"}
QK = ("attn_q", "attn_k")

Config = dict[str, Any]
ValueHeads = Literal["in turns", "by key head"]
ReadConfig = Callable[[Metadata, Container], Config]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    read_config: ReadConfig
    names: dict[str, str]  # a tensor's stem → its name in a checkpoint, {i} for the layer and
    # {e} for each expert of those that lie in one tensor
    rotated: tuple[str, ...] = ()  # rows of a head in the order of pairs that turn together
    by_head: tuple[str, ...] = ()  # rows in the order q, k, v instead of head by head
    transposed: tuple[str, ...] = ()  # [N, K] here and [K, N] in a checkpoint
    norm_shift: float = 0.0  # that was added to the norms
    value_heads: ValueHeads | None = None  # of layers with a delta rule
    scanned: bool = False  # some layers have Mamba 2
    others: Mapping[str, dict[str, str]] = field(default_factory=dict)  # `names` of what is another
    # family here, by its architecture

    def names_of(self, config: Config) -> dict[str, str]:
        """Those of a file that `read_config` has read."""
        return self.others.get(config["architectures"][0], self.names)


def layers_of(m: Metadata, c: Container) -> int:
    """How many layers there are, each of which has tensors."""
    key = m.own("block_count")
    count = m.integer(key)
    if count > len(c.tensors):
        raise m.fail(key, count, f"at most {len(c.tensors)}, the tensors that the file has")
    return count


def heads_by_layer(m: Metadata, c: Container, others: str) -> list[int]:
    """Heads of keys that each layer has; 0 of one that has `others` instead."""
    key, layers = m.own("attention.head_count_kv"), layers_of(m, c)
    heads = m.get(key)
    many = heads if isinstance(heads, list) else [heads]
    if not all(type(count) is int and count >= 0 for count in many) or len({*many, 0}) != 2:
        raise m.fail(key, heads, f"0 of layers with {others}, and one number of others")
    if len(many) not in (1, layers):
        raise m.fail(key, heads, f"one entry for each of {layers} layers")
    return many * (layers // len(many))


def head_dim_of(m: Metadata) -> int:
    """Of keys and of values."""
    heads, hidden = (m.integer(m.own(k)) for k in ("attention.head_count", "embedding_length"))
    if heads == 0 or hidden % heads:
        raise UnsupportedModelError(f"{heads} heads don't divide an embedding of {hidden}.")
    dim = m.integer(m.own("attention.key_length"), hidden // heads)
    if dim == 0:
        raise m.fail(m.own("attention.key_length"), dim, "above 0")
    if m.integer(m.own("attention.value_length"), dim) != dim:
        raise m.fail(m.own("attention.value_length"), "another", f"the key's length, {dim}")
    return dim


def usual_model(
    m: Metadata,
    c: Container,
    architecture: str,
    inner: int | None = None,
    kv_heads: int | None = None,
) -> Config:
    """What models with rotary embeddings have in common, but for their norms; inner: where a file
    needn't say it; kv_heads: where it doesn't as one number.
    """
    heads, dim = m.integer(m.own("attention.head_count")), head_dim_of(m)
    return {
        "architectures": [architecture],
        "hidden_size": m.integer(m.own("embedding_length")),
        "intermediate_size": m.integer(m.own("feed_forward_length"), inner),
        "num_hidden_layers": layers_of(m, c),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or m.integer(m.own("attention.head_count_kv"), heads),
        "head_dim": dim,
        "max_position_embeddings": m.integer(m.own("context_length")),
        **rope_config(m, c, dim),
    }


def rms_model(
    m: Metadata,
    c: Container,
    architecture: str,
    inner: int | None = None,
    kv_heads: int | None = None,
) -> Config:
    """What Llama and its kin have in common; inner, kv_heads: as `usual_model` takes them."""
    config = usual_model(m, c, architecture, inner, kv_heads)
    return config | {"rms_norm_eps": m.number(m.own("attention.layer_norm_rms_epsilon"))}


def check_scale(m: Metadata, config: Config) -> None:
    """A scale of the scores is refused where it isn't that of the head's length."""
    usual = config["head_dim"] ** -0.5
    given = m.number(m.own("attention.scale"), 0.0) or usual
    if abs(given - usual) > 1e-6 * usual:
        config["attention_multiplier"] = given


def with_biases(c: Container, config: Config) -> Config:
    """Whether there are biases shows in the tensors alone."""
    config["attention_bias"] = "blk.0.attn_q.bias" in c.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in c.tensors
    return config


def sliding_layers(m: Metadata, layers: int, window: int, period: int) -> list[str]:
    """`layer_types`, by a pattern that the file has, or where it has none by `period`: the last of
    so many layers sees everything.
    """
    pattern = m.get(m.own("attention.sliding_window_pattern"), period if window else 1)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    elif isinstance(pattern, list) and len(pattern) >= layers:
        slides = [bool(p) for p in pattern[:layers]]
    else:
        raise m.fail(m.own("attention.sliding_window_pattern"), pattern, f"one of {layers} layers")
    return ["sliding_attention" if s else "full_attention" for s in slides]

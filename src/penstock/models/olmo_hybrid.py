"""OLMo Hybrid: three layers of four have a gated delta rule, the fourth OLMo 2's attention.

What a key stood for may be turned around, not only taken out: the sigmoids of the rule count twice.
Source: OLMo Team 2026, the model's card; transformers' `olmo_hybrid`; Grazzi et al. 2024,
arXiv:2411.12537 (negative eigenvalues).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen3_next import both_kinds
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import AttentionSpec, DeltaSpec, LayerSpec, RopeSpec

_AT, _OWN = "model.layers.{i}", "layers.{i}.attention"
_DELTA = f"{_AT}.linear_attn"
_NAMES = (("A_log", "rates"), ("dt_bias", "shift"), ("o_norm.weight", "norm"))
_RULES: tuple[Rule, ...] = (
    Stack(tuple(f"{_DELTA}.{x}_proj.weight" for x in "qkvg"), f"{_OWN}.mixed.weight"),
    Stack(tuple(f"{_DELTA}.{x}_proj.weight" for x in "ab"), f"{_OWN}.gates.weight"),
    Stack(tuple(f"{_DELTA}.{x}_conv1d.weight" for x in "qkv"), f"{_OWN}.conv.weight"),
    Rename(f"{_DELTA}.conv1d.weight", f"{_OWN}.conv.weight"),
    *(Rename(f"{_DELTA}.{theirs}", f"{_OWN}.{ours}.weight") for theirs, ours in _NAMES),
    Rename(f"{_DELTA}.o_proj.weight", f"{_OWN}.out.weight"),
    Rename(f"{_AT}.attention_post_norm.weight", "layers.{i}.attention_post_norm.weight"),
    Rename(f"{_AT}.post_feedforward_layernorm.weight", "layers.{i}.mlp_post_norm.weight"),
    Ignore("mtp.*"),  # what guesses further tokens
    *QK_NORM_RULES,
    *DENSE_RULES,
)
_DRAWN = ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
"""Of how weights were drawn before training."""


def _turns(c: ConfigReader, dim: int) -> RopeSpec | None:
    """None where `rope_theta` is null, on the outside or in `rope_parameters`."""
    inside = c.get("rope_parameters")
    given = inside if isinstance(inside, dict) and "rope_theta" in inside else None
    theta = c.nullable("rope_theta", 10_000.0) if given is None else given["rope_theta"]
    if theta is not None:
        return rope(c, dim)
    for key in ("rope_theta", "rope_scaling"):
        c.get(key)
    return None


def _remembers(c: ConfigReader) -> AttentionSpec:
    """The gated delta rule that `linear_…` describe."""
    for key in _DRAWN:
        c.get(f"linear_{key}")
    c.only("hidden_act", ("silu", "swish"), "silu")  # the convolution's too, and that is built so
    heads = c.integer("num_attention_heads")
    keys = c.integer("linear_num_key_heads", heads)
    values = c.integer("linear_num_value_heads", heads)
    dim = c.integer("linear_key_head_dim", int(0.75 * c.integer("hidden_size") / keys) or 1)
    if values % keys or dim % 16:
        raise UnsupportedModelError(
            f"linear_num_value_heads {values} and linear_num_key_heads {keys} of {dim} dimensions "
            "aren't built: the first must be a multiple of the second, and dimensions one of 16."
        )
    delta = DeltaSpec(
        c.integer("linear_value_head_dim", 2 * dim),
        c.integer("linear_conv_kernel_dim", 4),
        norm_eps=1e-5,
        strength=2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    return AttentionSpec(values, keys, dim, dim**-0.5, None, delta=delta)


@register("OlmoHybridForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an OLMo Hybrid. Norms come before a delta rule, and after attention."""
    c.assume(max_position_embeddings=65_536)
    dim, mlp = head_dim(c), gated_mlp(c)
    attends = attention(c, _turns(c, dim), dim, bias=c.flag("attention_bias", False))
    attends = replace(attends, qk_norm="full")
    layers, aliases = [], []
    kinds = {"full_attention": attends, "linear_attention": _remembers(c)}
    for i, kind in enumerate(both_kinds(c, kinds, "full_attention_interval")):
        before, at = kind.has_state, f"model.layers.{i}."
        layers.append(LayerSpec(kind, mlp, pre_norm=before, post_norm=not before))
        after = "post_attention_layernorm" if before else "attention_post_norm"
        aliases += [
            (f"{at}attention_layer_norm.", f"{at}input_layernorm."),
            (f"{at}post_attention_layernorm.", f"{at}{after}."),
            (f"{at}feedforward_layer_norm.", f"{at}{after}."),
        ]
    found = model_spec(c, "olmo_hybrid", decoder(c, layers), _RULES)
    return replace(found, aliases=tuple(aliases))

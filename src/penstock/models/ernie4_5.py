"""ERNIE 4.5, dense and with experts: Llama whose neighbouring dimensions turn as pairs.

Source: Baidu 2025, ERNIE 4.5 Technical Report.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    attention,
    check_choice,
    decoder,
    gated_mlp,
    head_dim,
    model_spec,
    shared_rules,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule
from penstock.nn.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec


def _flat(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """[1, E] → [E]."""
    return tensor.flatten()


_EXPERTS: tuple[Rule, ...] = (
    *(
        Rename(
            f"model.layers.{{i}}.mlp.{at}moe_statics.e_score_correction_bias",
            "layers.{i}.mlp.correction.weight",
            _flat,
        )
        for at in ("", "gate.")
    ),
    Ignore("model.mtp_*"),  # what guesses
    *shared_rules("shared_experts"),
    *EXPERT_RULES,
)


@register("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an ERNIE 4.5 without experts, under its present or its first name."""
    c.assume(num_key_value_heads=2, max_position_embeddings=131_072, head_dim=128)
    bias = c.flag("use_bias", False)
    mlp = replace(gated_mlp(c), bias=bias)
    layers = (LayerSpec(_heads(c, bias), mlp),)
    spec = decoder(c, layers * c.integer("num_hidden_layers"), tied=True, eps=1e-5)
    return model_spec(c, "ernie4_5", spec, DENSE_RULES)


@register("Ernie4_5_MoeForCausalLM")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of an ERNIE 4.5 with experts; what trains its router, and what guesses, is
    left.
    """
    c.assume(
        num_key_value_heads=4, max_position_embeddings=131_072, moe_intermediate_size=1536,
        moe_layer_start_index=1, moe_layer_end_index=-1,
    )  # fmt: skip
    c.only("use_bias", (False,), False)
    c.only("moe_norm_min", (1e-12,), 1e-12)
    for key in ("router_aux_loss_coef", "num_nextn_predict_layers"):
        c.get(key)
    dense, mixed = gated_mlp(c), _mixed(c)
    layers = [LayerSpec(_heads(c, False), mixed if mixes else dense) for mixes in _mixing(c)]
    spec = decoder(c, layers, tied=True, eps=1e-5)
    return model_spec(c, "ernie4_5_moe", spec, (*_EXPERTS, *DENSE_RULES))


def _heads(c: ConfigReader, bias: bool) -> AttentionSpec:
    dim = head_dim(c)
    return attention(c, replace(rope(c, dim, theta=500_000.0), interleaved=True), dim, bias=bias)


def _mixed(c: ConfigReader) -> MlpSpec:
    """Experts that a softmax with a correction chooses, and a block beside them."""
    total, chosen = c.integer("moe_num_experts", 64), c.integer("moe_k", 6)
    check_choice("moe_k", chosen, total)
    c.only("num_local_experts", (total,), total)  # as GGUF calls them
    size, shared = c.integer("moe_intermediate_size"), c.get("moe_num_shared_experts", 2)
    if shared != 0:
        shared = c.integer("moe_num_shared_experts", 2)
    own = ExpertsSpec(total, chosen, normalize=True, correction=True, shared=size * shared)
    return replace(gated_mlp(c), intermediate=size, experts=own)


def _mixing(c: ConfigReader) -> list[bool]:
    """Which layers have experts: every `moe_layer_interval`th, from the first to the last."""
    count, every = c.integer("num_hidden_layers"), c.integer("moe_layer_interval", 1)
    first, last = c.get("moe_layer_start_index"), c.get("moe_layer_end_index")
    if any(type(end) is not int for end in (first, last)):
        raise UnsupportedModelError(
            "moe_layer_start_index and moe_layer_end_index must be numbers of layers, not "
            f"{first!r} and {last!r}."
        )
    last = count - 1 if last == -1 else last
    return [(i + 1) % every == 0 and first <= i <= last for i in range(count)]

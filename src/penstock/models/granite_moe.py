"""Granite with experts, and Granite 4: most of its layers have Mamba 2 where others attend.

Source: IBM 2025, the models' cards; transformers' `granitemoe`, `granitemoeshared` and
`granitemoehybrid`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    activation,
    decoder,
    expert_rules,
    experts,
    layer_kinds,
    model_spec,
    some_attend,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.granite import granite_heads, with_multipliers
from penstock.models.mamba import MAMBA_KEYS, MAMBA_RULES, mamba_heads
from penstock.models.registry import register
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import AttentionSpec, LayerSpec, MlpSpec

_AT = "model.layers.{i}"
EXPERTS: tuple[Rule, ...] = (
    Rename(f"{_AT}.block_sparse_moe.router.layer.weight", "layers.{i}.mlp.router.weight"),
    *expert_rules("block_sparse_moe", "gate_proj", "up_proj", "down_proj", "router"),
)
"""Names of a router and its experts."""


def block_rules(block: str) -> tuple[Rule, ...]:
    """The block that all tokens go through: a layer's own, or beside experts."""
    theirs, ours = f"{_AT}.shared_mlp", f"layers.{{i}}.{block}"
    return (
        Rename(f"{theirs}.input_linear.weight", f"{ours}.up.weight"),
        Rename(f"{theirs}.output_linear.weight", f"{ours}.down.weight"),
    )


def mixed_block(c: ConfigReader, shared: int) -> MlpSpec:
    """Experts, and beside them a block of so many between its matrices; 0: none."""
    for key in ("router_aux_loss_coef", "output_router_logits"):
        c.get(key)  # of training
    found = experts(c, 8, 2, "intermediate_size", normalize=True)
    assert found.experts is not None
    return replace(found, experts=replace(found.experts, shared=shared))


def _kinds(c: ConfigReader, attends: AttentionSpec) -> list[AttentionSpec]:
    """Each layer's attention, or the states in its place."""
    count = c.integer("num_hidden_layers")
    key = "layers_block_type" if c.has("layers_block_type") else "layer_types"
    types = c.get(key)
    if (
        isinstance(types, list)
        and types
        and all(x in ("attention", "full_attention") for x in types)
    ):
        for unused in MAMBA_KEYS:
            c.get(unused)
        return layer_kinds(key, types, dict.fromkeys(types, attends), count)
    remembers = mamba_heads(c, c.number("rms_norm_eps", 1e-6))
    kinds = {"attention": attends, "mamba": remembers}
    kinds |= {"full_attention": attends, "linear_attention": remembers}
    return some_attend(layer_kinds(key, types or ["mamba"] * count, kinds, count))


def _spec(
    c: ConfigReader, name: str, kinds: list[AttentionSpec], mlp: MlpSpec, *rules: Rule
) -> ModelSpec:
    c.get("init_method")  # of how weights were drawn before training
    c.only("normalization_function", ("rmsnorm",), "rmsnorm")
    spec = with_multipliers(c, decoder(c, [LayerSpec(kind, mlp) for kind in kinds]))
    return model_spec(c, name, spec, (*rules, *DENSE_RULES))


@register("GraniteMoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Granite 3 with experts."""
    kinds = [granite_heads(c)] * c.integer("num_hidden_layers")
    return _spec(c, "granite_moe", kinds, mixed_block(c, 0), *EXPERTS)


@register("GraniteMoeSharedForCausalLM")
def read_shared_config(c: ConfigReader) -> ModelSpec:
    """The same with a block beside the experts."""
    kinds = [granite_heads(c)] * c.integer("num_hidden_layers")
    mlp = mixed_block(c, shared_size(c, 0))
    return _spec(c, "granite_moe", kinds, mlp, *EXPERTS, *block_rules("mlp.shared"))


def shared_size(c: ConfigReader, default: int = 1024) -> int:
    """What lies between the matrices of the block that all tokens go through; 0: there is none."""
    size = c.get("shared_intermediate_size", default)
    return (
        size if size == 0 and type(size) is int else c.integer("shared_intermediate_size", default)
    )


@register("GraniteMoeHybridForCausalLM")
def read_hybrid_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Granite 4: with states or without, with experts or without."""
    position = c.only("position_embedding_type", ("rope", "nope", None), None)
    kinds = _kinds(c, granite_heads(c, turns=position == "rope"))
    if c.get("num_local_experts", 8) != 0:
        mlp = mixed_block(c, shared_size(c))
        rules = (*EXPERTS, *block_rules("mlp.shared"))
    else:
        for key in ("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"):
            c.get(key)  # of experts
        c.get("output_router_logits")
        if not shared_size(c):
            raise UnsupportedModelError(
                "config.json asks for no experts (num_local_experts 0) and for no block in their "
                "place (shared_intermediate_size 0)."
            )
        mlp = MlpSpec(shared_size(c), activation(c, "hidden_act", "silu"))
        rules = block_rules("mlp")
    return _spec(c, "granite_hybrid", kinds, mlp, *MAMBA_RULES, *rules)

"""Qwen3.5: Qwen3-Next's layers, with experts or without, and Qwen3-VL's tower without DeepStack.

Source: the models' cards, and transformers' `qwen3_5` and `qwen3_5_moe`; `qwen3_next` names papers.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, decoder, gated_mlp, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2_vl import together
from penstock.models.qwen3_next import HYBRID_RULES, MIXED_RULES, hybrid_layers, mixed_experts
from penstock.models.qwen3_vl import TOWER, tower
from penstock.models.registry import register
from penstock.models.spec import Ignore, ModelSpec, Rule, Stack
from penstock.nn.spec import LayerSpec, MlpSpec

_DELTA = "model.layers.{i}.linear_attn"
_RULES: tuple[Rule, ...] = (
    Stack(
        (f"{_DELTA}.in_proj_qkv.weight", f"{_DELTA}.in_proj_z.weight"),
        "layers.{i}.attention.mixed.weight",
    ),
    Stack(
        (f"{_DELTA}.in_proj_a.weight", f"{_DELTA}.in_proj_b.weight"),
        "layers.{i}.attention.gates.weight",
    ),
    *HYBRID_RULES,
)


def _text(c: ConfigReader, family: str, mlp: MlpSpec, rules: tuple[Rule, ...]) -> ModelSpec:
    layers = [LayerSpec(each, mlp) for each in hybrid_layers(c)]
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"):
        c.get(key)  # of layers that guess ahead
    spec = decoder(c, layers, offset=1.0)
    return model_spec(c, family, spec, (*_RULES, *rules, *DENSE_RULES))


def _dense(c: ConfigReader) -> ModelSpec:
    c.assume(num_key_value_heads=4, max_position_embeddings=32_768)
    return _text(c, "qwen3_5", gated_mlp(c), ())


def _mixed(c: ConfigReader) -> ModelSpec:
    c.assume(
        num_key_value_heads=2, max_position_embeddings=32_768, moe_intermediate_size=512,
    )  # fmt: skip
    c.get("intermediate_size")  # every layer has experts
    mixed = mixed_experts(c, 256, 8, normalize=True)
    return _text(c, "qwen3_5_moe", mixed, MIXED_RULES)


@register("Qwen3_5ForCausalLM")
def read_text_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen3.5 that sees nothing; a tower's tensors are left."""
    return _blind(_dense(c))


@register("Qwen3_5MoeForCausalLM")
def read_mixed_text_config(c: ConfigReader) -> ModelSpec:
    """The same of one with experts."""
    return _blind(_mixed(c))


@register("Qwen3_5ForConditionalGeneration")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen3.5."""
    return _seeing(c, _dense(c.part("text_config")))


@register("Qwen3_5MoeForConditionalGeneration")
def read_mixed_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Qwen3.5 with experts."""
    return _seeing(c, _mixed(c.part("text_config")))


def _seeing(c: ConfigReader, text: ModelSpec) -> ModelSpec:
    grid = tower(c.part("vision_config"), text.decoder.hidden)
    return together(c, text, grid, TOWER, text.family, image_token_id=248_056)


def _blind(text: ModelSpec) -> ModelSpec:
    """One whose checkpoint may have a tower all the same."""
    rules = (Ignore("model.visual.*"), *text.rules)
    return replace(text, rules=rules, aliases=(("model.language_model.", "model."),))

"""Phi 1, 1.5 and 2: both blocks read one norm's rows. Source: arXiv:2306.11644."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    activation,
    attention,
    decoder,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec, MlpSpec, NormSpec

_OWN: tuple[Rule, ...] = (
    Rename("model.final_layernorm.{p}", "norm.{p}"),
    Rename("model.layers.{i}.self_attn.dense.{p}", "layers.{i}.attention.out.{p}"),
    Rename("model.layers.{i}.mlp.fc1.{p}", "layers.{i}.mlp.up.{p}"),
    Rename("model.layers.{i}.mlp.fc2.{p}", "layers.{i}.mlp.down.{p}"),
)


@register("PhiForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Phi 1, 1.5 or 2."""
    c.only("qk_layernorm", (False,), False)
    dim = head_dim(c)
    mlp = MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation=activation(c, "hidden_act", "gelu_new", gated=False),
        gated=False,
        bias=True,
    )
    heads = attention(c, rope(c, dim, partial=0.5), dim, bias=True)
    layer = LayerSpec(heads, mlp, parallel=True, one_norm=True)
    norm = NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5), bias=True)
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), norm=norm)
    return model_spec(c, "phi", replace(spec, head_bias=True), (*_OWN, *DENSE_RULES))

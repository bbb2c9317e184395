"""Nemotron 3 and 4, Minitron: squared ReLUs and no gate, layer norms, half of each head turns.

Source: Parmar et al. 2024, arXiv:2402.16819.
"""

from __future__ import annotations

from penstock.models.common import (
    DENSE_RULES,
    UNGATED_RULES,
    attention,
    decoder,
    head_dim,
    model_spec,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec, MlpSpec, NormSpec


@register("NemotronForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Nemotron without states; 1 is added to its norms' weights."""
    c.assume(max_position_embeddings=4096)
    c.only("hidden_act", ("relu2",), "relu2")
    dim = head_dim(c)
    heads = attention(c, rope(c, dim, partial=0.5), dim, bias=c.flag("attention_bias", False))
    mlp = MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation="relu2",
        gated=False,
        bias=c.flag("mlp_bias", False),
    )
    norm = NormSpec("layer", eps=c.number("norm_eps", 1e-5), offset=1.0, bias=True)
    spec = decoder(c, (LayerSpec(heads, mlp),) * c.integer("num_hidden_layers"), norm=norm)
    return model_spec(c, "nemotron", spec, (*UNGATED_RULES, *DENSE_RULES))

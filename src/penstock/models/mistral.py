"""Mistral and Ministral: Llama with an optional sliding window. Source: arXiv:2310.06825.

Ministral 3 multiplies the queries of position p by 1 + β · ln(1 + ⌊p / L⌋), L being the context
that it was trained with before its rope was scaled: by 1 up to there. Beyond, nothing is built.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    gated_mlp,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec

logger = logging.getLogger("penstock")

_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0,
    "original_max_position_embeddings": 16_384, "beta_slow": 1.0, "mscale_all_dim": 1.0,
    "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@register("MistralForCausalLM", "MinistralForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Mistral or Ministral; every layer slides where `sliding_window` isn't null
    and `layer_types` says nothing else.
    """
    c.assume(num_key_value_heads=8, max_position_embeddings=131_072)
    dim = head_dim(c)
    base, mlp = attention(c, rope(c, dim), dim), gated_mlp(c)
    window = sliding_window(c, 4096)
    windows = layer_windows(c, c.integer("num_hidden_layers"), window, lambda _: window > 0)
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    return model_spec(c, "mistral", decoder(c, layers), DENSE_RULES)


@register("Ministral3ForCausalLM")
def read_third_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Ministral 3 without its vision tower, up to where queries are scaled."""
    c.assume(num_key_value_heads=8, max_position_embeddings=262_144, head_dim=128)
    ends = _unscaled_positions(c)
    dim = head_dim(c)
    heads = replace(attention(c, rope(c, dim), dim), window=sliding_window(c, None))
    layers = (LayerSpec(heads, gated_mlp(c)),) * c.integer("num_hidden_layers")
    spec = decoder(c, layers, eps=1e-5)
    if 0 < ends < spec.max_position:
        logger.warning(
            "This model's queries are scaled from position %s on, which isn't built: it runs up to "
            "there.", f"{ends:,}"
        )  # fmt: skip
        spec = replace(spec, max_position=ends)
    return model_spec(c, "ministral3", spec, DENSE_RULES)


def _unscaled_positions(c: ConfigReader) -> int:
    """How many positions' queries are multiplied by 1; 0: all. Takes what says so from the rope."""
    if not c.has("rope_parameters") and not c.has("rope_scaling"):
        c.replace(rope_parameters=_MINISTRAL3_ROPE)
    ends = 0
    for key in ("rope_parameters", "rope_scaling"):
        given = c.nested(key)
        if given is None:
            continue
        if given.has("llama_4_scaling_beta") and given.number("llama_4_scaling_beta"):
            ends = given.integer("original_max_position_embeddings")
        beside = ("llama_4_scaling_beta", "max_position_embeddings")  # the latter as it is outside
        c.replace(**{key: {k: v for k, v in c.get(key).items() if k not in beside}})
    return ends

"""StableLM: Llama with layer norms, a quarter of whose heads turns. Source: arXiv:2402.17834."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import DENSE_RULES, attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec
from penstock.nn.spec import LayerSpec, NormSpec


@register("StableLmForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a StableLM 2 or StableLM-3B without norms of queries and keys."""
    c.assume(num_key_value_heads=32, max_position_embeddings=4096)
    for key in ("qk_layernorm", "mlp_bias"):
        c.only(key, (False,), False)
    dim, parallel = head_dim(c), c.flag("use_parallel_residual", False)
    heads = attention(c, rope(c, dim, partial=0.25), dim)
    heads = replace(heads, qkv_bias=c.flag("use_qkv_bias", False))
    layer = LayerSpec(heads, gated_mlp(c), parallel=parallel, one_norm=parallel)
    norm = NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5), bias=True)
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), norm=norm)
    return model_spec(c, "stablelm", spec, DENSE_RULES)

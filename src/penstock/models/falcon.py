"""Falcon 7B, 40B, 180B and Falcon 2: blocks that read one norm's rows, or two norms', one input.

Source: Almazrouei et al. 2023, arXiv:2311.16867.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation, attention, decoder, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _split_heads(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of each key head's queries, key and value → all queries, all keys, all values."""
    a = spec.layers[0].attention
    rows = tensor.unflatten(0, (a.num_kv_heads, -1, a.head_dim))
    parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
    return torch.cat([part.flatten(0, 2) for part in parts])


_AT = "h.{i}"
_RULES: tuple[Rule, ...] = (
    Rename("word_embeddings.weight", "embed.weight"),
    Rename("lm_head.weight", "head.weight"),
    Rename("ln_f.{p}", "norm.{p}"),
    Rename(f"{_AT}.input_layernorm.{{p}}", "layers.{i}.attention_norm.{p}"),
    Rename(f"{_AT}.post_attention_layernorm.{{p}}", "layers.{i}.mlp_norm.{p}"),
    Rename(f"{_AT}.ln_attn.{{p}}", "layers.{i}.attention_norm.{p}"),
    Rename(f"{_AT}.ln_mlp.{{p}}", "layers.{i}.mlp_norm.{p}"),
    Rename(
        f"{_AT}.self_attention.query_key_value.{{p}}",
        "layers.{i}.attention.qkv.{p}",
        _split_heads,
        of_rows=True,
    ),
    Rename(f"{_AT}.self_attention.dense.{{p}}", "layers.{i}.attention.out.{p}"),
    Rename(f"{_AT}.mlp.dense_h_to_4h.{{p}}", "layers.{i}.mlp.up.{p}"),
    Rename(f"{_AT}.mlp.dense_4h_to_h.{{p}}", "layers.{i}.mlp.down.{p}"),
)


@register("FalconForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Falcon whose heads rotate; those with ALiBi aren't built."""
    c.only("alibi", (False,), False)
    c.only("apply_residual_connection_post_layernorm", (False,), False)
    dim, newer = head_dim(c), c.flag("new_decoder_architecture", False)
    c.replace(num_key_value_heads=_key_heads(c, newer))
    c.get("ff_factor")  # what ffn_hidden_size says
    bias, hidden = c.flag("bias", False), c.integer("hidden_size")
    mlp = MlpSpec(
        intermediate=c.integer("ffn_hidden_size", 4 * hidden),
        activation=activation(c, "activation", "gelu", gated=False),
        gated=False,
        bias=bias,
    )
    parallel = c.flag("parallel_attn", True)
    norms = c.only("num_ln_in_parallel_attn", (1, 2), 2 if newer else 1)
    if (newer and not parallel) or (not newer and norms == 2):
        raise UnsupportedModelError(
            "config.json asks for two norms of parallel blocks in the first architecture, or for "
            "blocks one after the other in the new one, which no Falcon has."
        )
    layer = LayerSpec(
        attention(c, rope(c, dim), dim, bias=bias),
        mlp,
        parallel=parallel,
        one_norm=parallel and norms == 1,
    )
    norm = NormSpec("layer", eps=c.number("layer_norm_epsilon", 1e-5), bias=True)
    spec = decoder(c, (layer,) * c.integer("num_hidden_layers"), norm=norm, tied=True)
    return model_spec(c, "falcon", spec, _RULES, prefixes=("transformer.",))


def _key_heads(c: ConfigReader, newer: bool) -> int:
    """Heads of keys: as `num_kv_heads` says in the new architecture, else one, or all."""
    heads = c.integer("num_attention_heads")
    if c.flag("multi_query", True) and not newer:
        c.get("num_kv_heads")
        return 1
    count = c.integer("num_kv_heads", heads)
    if count != heads and not newer:
        raise UnsupportedModelError(f"num_kv_heads {count} isn't num_attention_heads {heads}.")
    return count

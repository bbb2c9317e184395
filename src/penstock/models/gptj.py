"""GPT-J and CodeGen: both blocks read one norm's rows, and neighbouring dimensions turn as pairs.

Source: Wang and Komatsuzaki 2021, GPT-J-6B; Nijkamp et al. 2022, arXiv:2203.13474.
"""

from __future__ import annotations

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec

_SHARDS = 4
"""Machines that CodeGen was trained on, each with queries, values and keys of some heads."""


def _together(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of each machine's queries, values and keys → all queries, all keys, all values."""
    rows: Tensor = tensor.unflatten(0, (_SHARDS, 3, -1))[:, [0, 2, 1]]
    return rows.transpose(0, 1).flatten(0, 2)


_RULES: tuple[Rule, ...] = (
    Rename("wte.weight", "embed.weight"),
    Rename("lm_head.{p}", "head.{p}"),
    Rename("ln_f.{p}", "norm.{p}"),
    Rename("h.{i}.ln_1.{p}", "layers.{i}.attention_norm.{p}"),
    Stack(tuple(f"h.{{i}}.attn.{x}_proj.weight" for x in "qkv"), "layers.{i}.attention.qkv.weight"),
    Rename(
        "h.{i}.attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight", _together, of_rows=True
    ),
    Rename("h.{i}.attn.out_proj.weight", "layers.{i}.attention.out.weight"),
    Rename("h.{i}.mlp.fc_in.{p}", "layers.{i}.mlp.up.{p}"),
    Rename("h.{i}.mlp.fc_out.{p}", "layers.{i}.mlp.down.{p}"),
    Ignore("h.*.attn.bias"),  # causal masks
    Ignore("h.*.attn.masked_bias"),
    Ignore("h.*.attn.causal_mask"),
)


@register("GPTJForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GPT-J."""
    return _model(c, "gptj")


@register("CodeGenForCausalLM")
def read_code_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a CodeGen, whose heads four machines had as many of."""
    if c.integer("n_head", 16) % _SHARDS:
        raise UnsupportedModelError(f"n_head {c.get('n_head')} isn't a multiple of {_SHARDS}.")
    return _model(c, "codegen")


def _model(c: ConfigReader, family: str) -> ModelSpec:
    hidden, heads = c.integer("n_embd", 4096), c.integer("n_head", 16)
    positions = c.integer("n_positions", 2048)
    c.get("n_ctx")  # an older name, which n_positions overrides
    for key in ("rotary", "scale_attn_weights"):
        c.only(key, (True,), True)
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd {hidden} is not a multiple of n_head {heads}.")
    dim, turning = hidden // heads, c.integer("rotary_dim")
    if turning % 2 or turning > dim:
        raise UnsupportedModelError(f"rotary_dim {turning} of a head of {dim} isn't built.")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=RopeSpec(10_000.0, turning, interleaved=True),
    )
    mlp = MlpSpec(
        intermediate=c.integer("n_inner", 4 * hidden),
        activation=activation(c, "activation_function", "gelu_new", gated=False),
        gated=False,
        bias=True,
    )
    layer = LayerSpec(attention, mlp, parallel=True, one_norm=True)
    spec = DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=hidden,
        layers=(layer,) * c.integer("n_layer"),
        norm=NormSpec("layer", eps=c.number("layer_norm_epsilon", 1e-5), bias=True),
        max_position=positions,
        tied=c.flag("tie_word_embeddings", False),
        head_bias=True,
    )
    return model_spec(c, family, spec, _RULES, prefixes=("transformer.",))

"""What the families' readers share: rope, activations, the usual weight names."""

from __future__ import annotations

from typing import Literal, cast

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import DecoderSpec, RopeSpec

DENSE_RULES: tuple[Rule, ...] = (
    Rename("model.embed_tokens.weight", "embed.weight"),
    Rename("lm_head.{p}", "head.{p}"),
    Rename("model.norm.{p}", "norm.{p}"),
    Stack(
        tuple(f"model.layers.{{i}}.self_attn.{x}_proj.{{p}}" for x in "qkv"),
        "layers.{i}.attention.qkv.{p}",
    ),
    Rename("model.layers.{i}.self_attn.o_proj.{p}", "layers.{i}.attention.out.{p}"),
    Stack(
        ("model.layers.{i}.mlp.gate_proj.{p}", "model.layers.{i}.mlp.up_proj.{p}"),
        "layers.{i}.mlp.up.{p}",
    ),
    Rename("model.layers.{i}.mlp.down_proj.{p}", "layers.{i}.mlp.down.{p}"),
    Rename("model.layers.{i}.input_layernorm.{p}", "layers.{i}.attention_norm.{p}"),
    Rename("model.layers.{i}.post_attention_layernorm.{p}", "layers.{i}.mlp_norm.{p}"),
    Ignore("model.layers.*.self_attn.rotary_emb.inv_freq"),
)
"""Names of Llama and of most who followed it."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def activation(c: ConfigReader, key: str, default: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    """The activation that `key` names."""
    name = c.only(key, tuple(_ACTIVATIONS), default)
    return cast(Literal["silu", "gelu", "gelu_tanh"], _ACTIVATIONS[name])


def head_dim(c: ConfigReader) -> int:
    """Dimensions of one head, given or derived."""
    heads, hidden = c.integer("num_attention_heads"), c.integer("hidden_size")
    if c.has("head_dim"):
        return c.integer("head_dim")
    if hidden % heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
        )
    return hidden // heads


def rope(c: ConfigReader, dim: int, theta: float = 10000.0) -> RopeSpec:
    """The rotary embedding of a config: `rope_theta` and `rope_scaling`, or `rope_parameters`."""
    scaling = c.nested("rope_parameters") or c.nested("rope_scaling") or ConfigReader({})
    c.get("rope_scaling")
    base = scaling.number("rope_theta", c.number("rope_theta", theta))
    partial = scaling.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    spec = rope_spec(scaling, base, int(dim * partial), c.integer("max_position_embeddings", 2048))
    rest = scaling.unread()
    if rest:
        raise UnsupportedModelError(f"rope scaling has keys that nothing reads: {', '.join(rest)}.")
    return spec


def rope_spec(scaling: ConfigReader, theta: float, rotary_dim: int, max_position: int) -> RopeSpec:
    """One `rope_scaling` dictionary (possibly empty) as a `RopeSpec`."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling.get("type")
    original = int(scaling.number("original_max_position_embeddings", max_position))
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, kind="linear", factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            rotary_dim,
            kind="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=original,
        )
    raise UnsupportedModelError(f"rope type {kind!r} isn't built; default, linear and llama3 are.")


def model_spec(
    c: ConfigReader,
    family: str,
    decoder: DecoderSpec,
    rules: tuple[Rule, ...],
    prefixes: tuple[str, ...] = (),
) -> ModelSpec:
    """Put a `ModelSpec` together from a reader, with what every config has."""
    eos = c.get("eos_token_id", ())
    return ModelSpec(
        family=family,
        decoder=decoder,
        rules=rules,
        dtype=str(c.get("dtype", c.get("torch_dtype", "float32"))).removeprefix("torch."),
        bos_token_id=c.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        prefixes=prefixes,
    )

"""Gemma 4, text: heads of another size where a layer sees everything, normed values, and, by size,
inputs of each layer, keys and values that later layers read again, or experts beside the MLP.

Source: the models' cards, and transformers' `gemma4` and `gemma4_unified`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    QK_NORM_RULES,
    SANDWICH_RULES,
    activation,
    attention,
    check_choice,
    decoder,
    eos_tokens,
    gated_mlp,
    layer_windows,
    model_spec,
    sliding_window,
    softcap,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import read_part, register
from penstock.models.rope import rope_spec
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Stack
from penstock.nn.spec import (
    AttentionSpec,
    ExpertsSpec,
    InputsSpec,
    LayerSpec,
    MlpSpec,
    RopeSpec,
)

_TEXT = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_144,
}
"""Of transformers' Gemma4TextConfig."""
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
    },
}  # fmt: skip

_AT = "model.layers.{i}"
_INPUT_RULES: tuple[Rule, ...] = (
    Rename("model.embed_tokens_per_layer.weight", "inputs.table.weight"),
    Rename("model.per_layer_model_projection.weight", "inputs.projection.weight"),
    Rename("model.per_layer_projection_norm.weight", "inputs.norm.weight"),
    Rename(f"{_AT}.per_layer_input_gate.{{p}}", "layers.{i}.own_input.gate.{p}"),
    Rename(f"{_AT}.per_layer_projection.{{p}}", "layers.{i}.own_input.out.{p}"),
    Rename(f"{_AT}.post_per_layer_input_norm.weight", "layers.{i}.own_input.norm.weight"),
)
_MIXED_RULES: tuple[Rule, ...] = (
    Rename(f"{_AT}.router.proj.{{p}}", "layers.{i}.mlp.router.{p}"),
    Rename(f"{_AT}.router.scale", "layers.{i}.mlp.norms.router.weight"),
    Rename(f"{_AT}.router.per_expert_scale", "layers.{i}.mlp.weighs.weight"),
    Rename(f"{_AT}.pre_feedforward_layernorm_2.weight", "layers.{i}.mlp.norms.experts.weight"),
    Rename(
        f"{_AT}.post_feedforward_layernorm_2.weight", "layers.{i}.mlp.norms.experts_post.weight"
    ),
    Rename(f"{_AT}.post_feedforward_layernorm_1.weight", "layers.{i}.mlp.norms.shared_post.weight"),
    Stack(
        (f"{_AT}.experts.{{e}}.gate_proj.{{p}}", f"{_AT}.experts.{{e}}.up_proj.{{p}}"),
        "layers.{i}.mlp.up.{e}.{p}",
    ),
    Rename(f"{_AT}.experts.{{e}}.down_proj.{{p}}", "layers.{i}.mlp.down.{e}.{p}"),
    Stack(
        (f"{_AT}.mlp.gate_proj.{{p}}", f"{_AT}.mlp.up_proj.{{p}}"),
        "layers.{i}.mlp.shared.up.{p}",
    ),
    Rename(f"{_AT}.mlp.down_proj.{{p}}", "layers.{i}.mlp.shared.down.{p}"),
)
_TOWERS = ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")


@dataclass(frozen=True, slots=True)
class _Heads:
    """Of the layers that slide, or of those that see everything."""

    dim: int
    kv_heads: int


@register("Gemma4ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 4 that reads text."""
    c.assume(**_TEXT, eos_token_id=1)
    return _text(c, "gemma4", window=512, input_dim=256)


@register("Gemma4UnifiedForCausalLM")
def read_unified_config(c: ConfigReader) -> ModelSpec:
    """The same of the size that needs no towers: without experts, and inputs of layers."""
    c.assume(**_TEXT | {"max_position_embeddings": 262_144}, eos_token_id=1)
    return _text(c, "gemma4_unified", window=1024, input_dim=0)


@register("Gemma4ForConditionalGeneration")
def read_seeing_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Gemma 4 with towers, of which the decoder is read."""
    return _text_of(c, "gemma4_text")


@register("Gemma4UnifiedForConditionalGeneration")
def read_unified_seeing_config(c: ConfigReader) -> ModelSpec:
    """The same of one whose decoder reads patches and frames."""
    return _text_of(c, "gemma4_unified_text")


def _text_of(c: ConfigReader, kind: str) -> ModelSpec:
    """The decoder of a model that sees and hears, which a warning says it doesn't here."""
    text = read_part(c, "text_config", (kind,), eos_token_id=1)
    if c.has("eos_token_id"):  # of the whole model: it may have more
        text = replace(text, eos_token_ids=eos_tokens(c))
    marks = ("image", "video", "audio", "boi", "eoi", "boa")
    for key in (*(f"{mark}_token_id" for mark in marks), "eoa_token_index", "eoa_token_id"):
        c.get(key)
    c.get("vision_soft_tokens_per_image")
    if any([c.get("vision_config"), c.get("audio_config")]):
        warnings.warn(
            "This Gemma 4 sees pictures and hears sounds, which isn't built: its decoder is read, "
            "for text, and its towers' tensors are left.",
            UserWarning,
            stacklevel=5,
        )
    spec = replace(text.decoder, tied=c.flag("tie_word_embeddings", text.decoder.tied))
    towers = tuple(Ignore(f"model.{name}.*") for name in _TOWERS)
    return replace(
        text,
        decoder=spec,
        dtype=c.dtype or text.dtype,
        rules=(*towers, *text.rules),
        aliases=(("model.language_model.", "model."),),
    )


def _text(c: ConfigReader, family: str, *, window: int, input_dim: int) -> ModelSpec:
    """window, input_dim: the kind's own defaults."""
    c.only("use_bidirectional_attention", (None, "vision"), None)  # of pictures' tokens
    count = c.integer("num_hidden_layers")
    windows = layer_windows(c, count, sliding_window(c, window), lambda i: (i + 1) % 6 > 0)
    if windows[-1]:
        raise UnsupportedModelError(
            "layer_types says that the last layer slides; of a Gemma 4 it must be full_attention."
        )
    attentions = _attentions(c, windows)
    dense, mixed = gated_mlp(c, "hidden_activation", "gelu_pytorch_tanh"), _experts(c)
    wide = replace(dense, intermediate=2 * dense.intermediate)
    doubled = c.flag("use_double_wide_mlp", False)
    if mixed is not None and doubled:
        raise UnsupportedModelError(
            "config.json asks for use_double_wide_mlp and enable_moe_block: one of them is built."
        )
    inputs = _inputs(c, input_dim)
    layers = [
        LayerSpec(
            a,
            mixed or (wide if doubled and a.reads is not None else dense),
            post_norm=True,
            input_dim=0 if inputs is None else inputs.dim,
            scalar=True,
        )
        for a in attentions
    ]
    spec = decoder(
        c,
        layers,
        tied=True,
        embed_scale=math.sqrt(c.integer("hidden_size")),
        final_softcap=softcap(c, "final_logit_softcapping", None),
    )
    rules = (
        *_attention_rules(attentions),
        Rename(f"{_AT}.layer_scalar", "layers.{i}.scalar.weight"),
        *(_INPUT_RULES if inputs is not None else ()),
        *(_MIXED_RULES if mixed is not None else ()),
        *QK_NORM_RULES,
        *SANDWICH_RULES,
        *DENSE_RULES,
    )
    return model_spec(c, family, replace(spec, inputs=inputs), rules)


def _attentions(c: ConfigReader, windows: tuple[int, ...]) -> list[AttentionSpec]:
    """Each layer's; the last ones may read what earlier ones have written."""
    slides, whole = _heads(c, windows)
    local, everywhere = _ropes(c, slides.dim, whole.dim)
    bias = c.flag("attention_bias", False)

    def of(heads: _Heads, rope: RopeSpec) -> AttentionSpec:
        c.replace(num_key_value_heads=heads.kv_heads)
        base = attention(c, rope, heads.dim, scale=1.0, bias=bias)
        return replace(base, qk_norm="head", value_norm=True)

    kinds = {True: of(slides, local), False: of(whole, everywhere)}
    if c.flag("attention_k_eq_v", False):
        kinds[False] = replace(kinds[False], keys_are_values=True)
    count, shared = len(windows), c.get("num_kv_shared_layers", 0)
    if type(shared) is not int or not 0 <= shared < count:
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers must be a number from 0 to {count - 1}: {shared!r}"
        )
    latest: dict[bool, int] = {}  # of each kind, that writes
    found = []
    for i, window in enumerate(windows):
        kind = window > 0
        own = replace(kinds[kind], window=window)
        if i < count - shared:
            latest[kind] = i
        elif kind not in latest:
            raise UnsupportedModelError(
                f"config.json: num_kv_shared_layers {shared} lets layer {i} read an earlier one's "
                "keys and values, but none of its kind has some."
            )
        else:
            own = replace(own, reads=latest[kind])
        found.append(own)
    return found


def _heads(c: ConfigReader, windows: tuple[int, ...]) -> tuple[_Heads, _Heads]:
    """Of layers that slide and of those that see everything: `per_layer_config` says so in newer
    configs, `global_head_dim` and `num_global_key_value_heads` in older ones.
    """
    usual = _Heads(c.integer("head_dim"), c.integer("num_key_value_heads"))
    keys_are_values = c.flag("attention_k_eq_v", False)
    own = c.nested("per_layer_config")
    if own is None:
        whole = replace(usual, dim=c.integer("global_head_dim", 512))
        if c.has("num_global_key_value_heads") and keys_are_values:
            whole = replace(whole, kv_heads=c.integer("num_global_key_value_heads"))
        return usual, whole
    found: dict[bool, set[_Heads]] = {True: set(), False: set()}
    for i, window in enumerate(windows):
        layer = own.nested(str(i)) or ConfigReader({})
        dim = layer.integer("head_dim", usual.dim)
        found[window > 0].add(_Heads(dim, layer.integer("num_key_value_heads", usual.kv_heads)))
        if rest := layer.unread():
            raise UnsupportedModelError(
                f"per_layer_config says {', '.join(rest)} of layer {i}; built for this family are "
                "head_dim and num_key_value_heads."
            )
    if rest := own.unread():
        raise UnsupportedModelError(
            f"per_layer_config has layers that there aren't: {', '.join(rest)}."
        )
    for kind, heads in found.items():
        if len(heads) > 1:
            raise UnsupportedModelError(
                f"per_layer_config must say the same of all layers with "
                f"{'sliding_attention' if kind else 'full_attention'}."
            )
    whole = next(iter(found[False]))
    for key, size in (
        ("global_head_dim", whole.dim),
        ("num_global_key_value_heads", whole.kv_heads),
    ):
        if c.has(key) and c.integer(key) != size:
            warnings.warn(
                f"config.json gives {key}={c.integer(key)}, but per_layer_config {size}, which is "
                "what counts, as in transformers.",
                UserWarning,
                stacklevel=2,
            )
    return next(iter(found[True]), usual), whole


def _ropes(c: ConfigReader, local_dim: int, whole_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotations of layers that slide and of those that see everything."""
    both: Any = c.nested("rope_parameters") or ConfigReader(_ROPES, "rope_parameters")
    local = rope_spec(c, both.nested("sliding_attention"), local_dim, theta=1e4, partial=1.0)
    whole = rope_spec(c, both.nested("full_attention"), whole_dim, theta=1e6, partial=1.0)
    if both.unread():
        raise UnsupportedModelError(
            f"rope_parameters has keys that nothing reads: {', '.join(both.unread())}. "
            "This family keeps one object for full_attention and one for sliding_attention there."
        )
    for found, dim in ((local, local_dim), (whole, whole_dim)):
        if found.rotary_dim != dim:
            raise UnsupportedModelError(
                f"rope_parameters: a partial_rotary_factor is built for rope_type 'proportional' "
                f"in this family, not {found.kind!r}."
            )
    return local, whole


def _experts(c: ConfigReader) -> MlpSpec | None:
    """The block of layers with experts, where there are some: they stand beside the usual MLP."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not c.flag("enable_moe_block", False):
        for key in keys:
            c.get(key)
        return None
    count, chosen, size = (c.integer(key) for key in keys)
    check_choice("top_k_experts", chosen, count)
    shared = c.integer("intermediate_size")
    return MlpSpec(
        intermediate=size,
        activation=activation(c, "hidden_activation", "gelu_pytorch_tanh"),
        experts=ExpertsSpec(count, chosen, normalize=True, shared=shared, apart=True, weighed=True),
    )


def _inputs(c: ConfigReader, default: int) -> InputsSpec | None:
    """Inputs of each layer: what `hidden_size_per_layer_input` says, 0 or null for none."""
    dim = c.nullable("hidden_size_per_layer_input", default)
    rows = c.integer("vocab_size_per_layer_input", c.integer("vocab_size"))
    if dim is None or (type(dim) is int and dim == 0):
        return None
    if rows < c.integer("vocab_size"):
        raise UnsupportedModelError(
            f"config.json: vocab_size_per_layer_input {rows} is below vocab_size "
            f"{c.integer('vocab_size')}: some tokens would have no inputs of layers."
        )
    return InputsSpec(c.integer("hidden_size_per_layer_input", default), rows)


def _attention_rules(attentions: list[AttentionSpec]) -> tuple[Rule, ...]:
    """Of layers that make less than queries, keys and values, which files may have all the same."""
    rules: list[Rule] = []
    for i, a in enumerate(attentions):
        at, ours = f"model.layers.{i}.self_attn", f"layers.{i}.attention.qkv.{{p}}"
        if a.parts == 2:
            rules.append(Stack((f"{at}.q_proj.{{p}}", f"{at}.k_proj.{{p}}"), ours))
        elif a.parts == 1:
            rules.append(Rename(f"{at}.q_proj.{{p}}", ours))
            rules += [Ignore(f"{at}.{x}.*") for x in ("k_proj", "v_proj", "k_norm", "v_norm")]
    return tuple(rules)

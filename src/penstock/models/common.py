"""What the families' readers share: the usual keys and the usual weight names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.spec import Ignore, ModelSpec, Ones, Rename, Rule, Stack
from penstock.nn.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)

Kind = TypeVar("Kind")

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
"""Names of Llama and of most who followed it. A family's own rules come before: the first wins."""

QK_NORM_RULES: tuple[Rule, ...] = tuple(
    Rename(
        f"model.layers.{{i}}.self_attn.{x}_norm.weight", f"layers.{{i}}.attention.{x}_norm.weight"
    )
    for x in "qk"
)
"""Norms of queries and keys."""


def expert_rules(
    block: str, gate: str, up: str, down: str, router: str = "gate"
) -> tuple[Rule, ...]:
    """Names of a layer's router and experts: in `block`, each expert's three matrices."""
    at = f"model.layers.{{i}}.{block}"
    return (
        Rename(f"{at}.{router}.{{p}}", "layers.{i}.mlp.router.{p}"),
        Stack(
            (f"{at}.experts.{{e}}.{gate}.{{p}}", f"{at}.experts.{{e}}.{up}.{{p}}"),
            "layers.{i}.mlp.up.{e}.{p}",
        ),
        Rename(f"{at}.experts.{{e}}.{down}.{{p}}", "layers.{i}.mlp.down.{e}.{p}"),
    )


EXPERT_RULES = expert_rules("mlp", "gate_proj", "up_proj", "down_proj")
"""Names of those who have experts where Llama has its MLP."""


def shared_rules(block: str) -> tuple[Rule, ...]:
    """Names of a block beside experts, as the family calls it."""
    at = f"model.layers.{{i}}.mlp.{block}"
    return (
        Stack((f"{at}.gate_proj.{{p}}", f"{at}.up_proj.{{p}}"), "layers.{i}.mlp.shared.up.{p}"),
        Rename(f"{at}.down_proj.{{p}}", "layers.{i}.mlp.shared.down.{p}"),
    )


SHARED_RULES: tuple[Rule, ...] = (
    Rename("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.correction.weight"),
    *shared_rules("shared_experts"),
)
"""DeepSeek's names of what experts have beside them."""

PLAIN_NORM_RULES: tuple[Rule, ...] = tuple(
    Ones((), target)
    for target in (
        "norm.weight", "layers.{i}.attention_norm.weight", "layers.{i}.mlp_norm.weight"
    )
)  # fmt: skip
"""Norms that have no weights."""

SINK_RULES: tuple[Rule, ...] = tuple(
    Rename(f"model.layers.{{i}}.self_attn.sinks{end}", "layers.{i}.attention.sinks.weight")
    for end in ("", ".weight")  # the latter in GGUF
)
"""A logit of each head that nothing is seen for."""

SANDWICH_RULES: tuple[Rule, ...] = tuple(
    Rename(f"model.layers.{{i}}.{theirs}.weight", f"layers.{{i}}.{ours}.weight")
    for theirs, ours in (
        ("post_attention_layernorm", "attention_post_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "mlp_post_norm"),
    )
)
"""Norms after a block: `post_attention_layernorm` means what it says there."""

FUSED_MLP_RULES: tuple[Rule, ...] = (
    Rename("model.layers.{i}.mlp.gate_up_proj.weight", "layers.{i}.mlp.up.weight"),
)
"""Gate and up in one matrix."""

UNGATED_RULES: tuple[Rule, ...] = (
    Rename("model.layers.{i}.mlp.up_proj.{p}", "layers.{i}.mlp.up.{p}"),
)
"""No gate beside `up_proj`."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def activation(
    c: ConfigReader, key: str, default: str, *, gated: bool = True
) -> Literal["silu", "gelu", "gelu_tanh"]:
    """The activation that `key` names; without a gate only gelu is built."""
    names = [name for name, built in _ACTIVATIONS.items() if gated or built != "silu"]
    name = c.only(key, names, default)
    return cast(Literal["silu", "gelu", "gelu_tanh"], _ACTIVATIONS[name])


def head_dim(c: ConfigReader, default: int | None = None) -> int:
    """Dimensions of one head: given, the family's default, or derived."""
    heads, hidden = c.integer("num_attention_heads"), c.integer("hidden_size")
    if c.has("head_dim") or default is not None:
        return c.integer("head_dim", default)
    if hidden % heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
        )
    return hidden // heads


def attention(
    c: ConfigReader,
    rope: RopeSpec | None,
    dim: int,
    *,
    scale: float | None = None,
    bias: bool = False,
) -> AttentionSpec:
    """Grouped-query attention in the usual names; a family replaces what it has otherwise."""
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            f"{', which is a default' * ('num_key_value_heads' in c.sizes)}."
        )
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5 if scale is None else scale,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def gated_mlp(c: ConfigReader, key: str = "hidden_act", default: str = "silu") -> MlpSpec:
    """Gate, up and down in the usual names."""
    return MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation=activation(c, key, default),
        bias=c.flag("mlp_bias", False),
    )


def experts(c: ConfigReader, count: int, per_token: int, size: str, *, normalize: bool) -> MlpSpec:
    """Experts in the usual names. count: the family's default of their number, under either of its
    names; per_token: of those that a token takes; size: the key of what lies between their
    matrices.
    """
    keys = [key for key in ("num_local_experts", "num_experts") if c.has(key)] or ["num_experts"]
    local, total = c.integer(keys[0], count), c.integer(keys[-1], count)
    if total != local:
        raise UnsupportedModelError(
            f"config.json: num_experts {total} and num_local_experts {local} differ."
        )
    chosen = c.integer("num_experts_per_tok", per_token)
    check_choice("num_experts_per_tok", chosen, total)
    return MlpSpec(
        intermediate=c.integer(size),
        activation=activation(c, "hidden_act", "silu"),
        experts=ExpertsSpec(total, chosen, normalize),
    )


def check_choice(key: str, chosen: int, total: int) -> None:
    """Raises UnsupportedModelError for more experts a token, as `key` says, than there are."""
    if chosen > total:
        raise UnsupportedModelError(
            f"config.json: {key} {chosen} is more than the {total} experts that there are."
        )


def routed_experts(
    c: ConfigReader, count: int, per_token: int, *, normalize: bool, scale: float, groups: int
) -> MlpSpec:
    """Experts in DeepSeek-V3's names, chosen by sigmoids; arguments are the family's defaults."""
    c.only("scoring_func", ("sigmoid",), "sigmoid")
    c.only("topk_method", ("noaux_tc",), "noaux_tc")
    normalize = c.flag("norm_topk_prob", normalize)
    spec = _grouped(c, count, per_token, normalize=normalize, scale=scale, groups=groups)
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, sigmoid=True, correction=True))


def softmax_experts(c: ConfigReader, count: int) -> MlpSpec:
    """Experts in DeepSeek-V2's names; count: the family's default."""
    c.only("scoring_func", ("softmax",), "softmax")
    c.only("norm_topk_prob", (False,), False)
    limited = c.only("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    spec = _grouped(c, count, None, normalize=False, scale=1.0, groups=1)
    assert spec.experts is not None
    return spec if limited else replace(spec, experts=replace(spec.experts, groups=1, top_groups=1))


def _grouped(
    c: ConfigReader,
    count: int,
    per_token: int | None,
    *,
    normalize: bool,
    scale: float,
    groups: int,
) -> MlpSpec:
    c.only("moe_layer_freq", (1,), 1)
    for key in ("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "ep_size"):
        c.get(key)  # of training, or of where experts lie
    total, groups = c.integer("n_routed_experts", count), c.integer("n_group", groups)
    chosen = c.integer("num_experts_per_tok", per_token)
    top = c.integer("topk_group", max(groups // 2, 1))
    if total % groups or top > groups or chosen > total // groups * top:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok {chosen} can't be chosen from topk_group {top} of "
            f"n_group {groups} groups of {total} experts."
        )
    size = c.integer("moe_intermediate_size")
    return MlpSpec(
        intermediate=size,
        activation=activation(c, "hidden_act", "silu"),
        experts=ExpertsSpec(
            total,
            chosen,
            normalize,
            groups=groups,
            top_groups=top,
            scale=c.positive("routed_scaling_factor", scale),
            shared=size * _shared_experts(c),
        ),
    )


def dense_first(
    c: ConfigReader,
    dense: MlpSpec,
    mixed: MlpSpec,
    default: int,
    key: str = "first_k_dense_replace",
) -> list[MlpSpec]:
    """Each layer's block: as many as `key` says without experts, then those that have some."""
    count, first = c.integer("num_hidden_layers"), c.get(key, default)
    if type(first) is not int or first < 0:
        raise UnsupportedModelError(
            f"config.json: {key} must be a whole number from 0 on: {first!r}"
        )
    return [dense if i < first else mixed for i in range(count)]


def mixed_blocks(c: ConfigReader, dense: MlpSpec, mixed: MlpSpec, default: int) -> list[MlpSpec]:
    """Each layer's: as `mlp_layer_types` says, or all but the first ones with experts."""
    blocks, types = dense_first(c, dense, mixed, default), c.get("mlp_layer_types")
    if types is None:
        return blocks
    kinds = {"dense": dense, "sparse": mixed}
    return layer_kinds("mlp_layer_types", types, kinds, len(blocks))


def _shared_experts(c: ConfigReader) -> int:
    count = c.get("n_shared_experts", 0)
    return count if type(count) is int and count == 0 else c.integer("n_shared_experts")


def predicting_layers(c: ConfigReader, default: int) -> tuple[Rule, ...]:
    """Layers behind the last one, which guess tokens ahead (MTP): nothing reads them."""
    c.get("num_nextn_predict_layers")
    more = c.get("num_mtp_layers", c.get("num_nextn_predict_layers", default))
    if type(more) is not int or not 0 <= more <= 64:
        raise UnsupportedModelError(f"config.json: num_nextn_predict_layers can't be {more!r}")
    first = c.integer("num_hidden_layers")
    return tuple(Ignore(f"model.layers.{first + i}.*") for i in range(more))


def decoder(
    c: ConfigReader,
    layers: Iterable[LayerSpec],
    *,
    tied: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    embed_scale: float = 1.0,
    final_softcap: float = 0.0,
    norm: NormSpec | None = None,
) -> DecoderSpec:
    """A decoder in the usual names, with RMS norms unless `norm` is given; `tied` and `eps` are
    defaults.
    """
    if norm is None:
        norm = NormSpec(eps=c.number("rms_norm_eps", eps), offset=offset)
    return DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=c.integer("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        max_position=c.integer("max_position_embeddings", 2048),
        tied=c.flag("tie_word_embeddings", tied),
        embed_scale=embed_scale,
        final_softcap=final_softcap,
    )


def sliding_window(c: ConfigReader, default: int | None) -> int:
    """`sliding_window`, 0 where it is null; `default` is what its absence means."""
    if c.nullable("sliding_window", default) is None:
        return 0
    return c.integer("sliding_window", default)


def softcap(c: ConfigReader, key: str, default: float | None) -> float:
    """The cap that `key` gives, 0 where it is null; `default` is what its absence means."""
    return 0.0 if c.nullable(key, default) is None else c.number(key, default)


def layer_windows(
    c: ConfigReader, count: int, window: int, slides: Callable[[int], bool]
) -> tuple[int, ...]:
    """How far each of `count` layers sees back, 0 for all the way.

    `layer_types` says which layers slide; where it is absent, `slides(layer)` does.
    """
    types = c.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    kinds = {"sliding_attention": window, "full_attention": 0}
    windows = layer_kinds("layer_types", types, kinds, count)
    if "sliding_attention" in types and not window:
        raise UnsupportedModelError(
            "layer_types asks for sliding attention, but no sliding_window is in effect."
        )
    return tuple(windows)


def layer_kinds(key: str, types: Any, kinds: Mapping[str, Kind], count: int) -> list[Kind]:
    """What `types`, the value of `key`, names for each of `count` layers, of `kinds`."""
    if not isinstance(types, list) or len(types) != count:
        said = f"{len(types)} layers" if isinstance(types, list) else repr(types)
        raise UnsupportedModelError(f"{key} must name {count} layers, not {said}.")
    for i, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in kinds:
            raise UnsupportedModelError(
                f"{key} asks for {kind!r} in layer {i}; built: {', '.join(kinds)}."
            )
    return [kinds[kind] for kind in types]


def some_attend(kinds: list[AttentionSpec]) -> list[AttentionSpec]:
    """`kinds`, of a model some of whose layers attend. Raises UnsupportedModelError for others."""
    if all(kind.has_state or kind.is_absent for kind in kinds):
        raise UnsupportedModelError(
            "No layer attends, as config.json says; models some of whose layers do are built."
        )
    return kinds


def mixing_layers(c: ConfigReader, count: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`th, but those of `mlp_only_layers`."""
    step, plain = c.integer("decoder_sparse_step", 1), c.get("mlp_only_layers", [])
    if not isinstance(plain, list) or any(type(i) is not int for i in plain):
        raise UnsupportedModelError(f"mlp_only_layers must be a list of layers: {plain!r}")
    return [(i + 1) % step == 0 and i not in plain for i in range(count)]


def upper_layer_windows(c: ConfigReader, count: int) -> tuple[int, ...]:
    """Qwen's: with `use_sliding_window`, layers from `max_window_layers` on slide."""
    window, first = sliding_window(c, 4096), c.number("max_window_layers", 28)
    window = window if c.flag("use_sliding_window", False) else 0
    return layer_windows(c, count, window, lambda i: window > 0 and i >= first)


def eos_tokens(c: ConfigReader) -> tuple[int, ...]:
    """The ids that end an answer, as `eos_token_id` has one or several; () for none."""
    eos = c.get("eos_token_id", ())
    ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UnsupportedModelError(f"config.json: eos_token_id must be integers: {eos!r}")
    return ids


def model_spec(
    c: ConfigReader,
    family: str,
    decoder: DecoderSpec,
    rules: tuple[Rule, ...],
    prefixes: tuple[str, ...] = (),
) -> ModelSpec:
    """Put a `ModelSpec` together from a reader, with what every config has."""
    return ModelSpec(
        family=family,
        decoder=decoder,
        rules=rules,
        dtype=c.dtype,
        bos_token_id=c.get("bos_token_id"),
        eos_token_ids=eos_tokens(c),
        prefixes=prefixes,
        unsaid=tuple(c.sizes.items()),
    )

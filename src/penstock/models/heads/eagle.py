"""Checkpoints of EAGLE heads, in the layouts that are about.

EAGLE-1 and 2, the authors' (pytorch_model.bin or model.safetensors): `fc.weight` [D, 2D] over the
embedding beside the feature, `fc.bias` in the first ones, `layers.0.…` as a Llama's layer without
an input_layernorm; often a copy of the target's `embed_tokens.weight`.
EAGLE-3, the authors': `fc.weight` [D, n · D'], `midlayer.…` with `hidden_norm` and projections of
2D columns, `norm.weight`, `lm_head.weight` over a draft vocabulary, whose row i stands for token
i + d2t[i]; t2d says which tokens have a row. vLLM's and speculators' write `layers.0.` for
`midlayer.`, and the latter the layer's config under transformer_layer_config.

Which states an EAGLE-3 head reads: `eagle_aux_hidden_state_layer_ids` names layers whose input is
meant, as in vLLM and speculators; within `eagle_config`, where SpecForge, ModelOpt and SGLang have
it, layers whose output is meant. Without either: the inputs of layers 2, n // 2 and n − 3.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.common import attention, decoder, gated_mlp, head_dim
from penstock.models.computable import check_rope
from penstock.models.config_reader import ConfigReader
from penstock.models.heads import medusa
from penstock.models.heads.source import (
    STORED,
    Ids,
    as_ids,
    check_finite,
    check_ids,
    read_tensors,
)
from penstock.models.registry import read_json
from penstock.models.rope import rope
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule, Stack
from penstock.models.weights import load_weights
from penstock.nn import Decoder, DecoderSpec, LayerSpec, RopeSpec
from penstock.nn.eagle import EagleHead, EagleSpec, target_embedding
from penstock.quant import Scheme
from penstock.tokenizer.vocab_map import VocabMap

FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights may be, the first that is there."""

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_SAID = """bias qkv_bias attention_bias num_hidden_layers target_hidden_size embed_requires_grad
    speculators_model_type speculators_version speculators_config""".split()
"""Keys of a config that the tensors say too, or that are about training."""

_LAYER = "layers.0."

_COMMON_RULES: tuple[Rule, ...] = (
    Rename("embed_tokens.weight", "embed.weight"),
    Rename("lm_head.weight", "head.weight"),
    Rename(f"{_LAYER}self_attn.o_proj.{{p}}", "layer.attention.out.{p}"),
    Stack((f"{_LAYER}mlp.gate_proj.{{p}}", f"{_LAYER}mlp.up_proj.{{p}}"), "layer.mlp.up.{p}"),
    Rename(f"{_LAYER}mlp.down_proj.{{p}}", "layer.mlp.down.{p}"),
    Rename(f"{_LAYER}post_attention_layernorm.weight", "layer.mlp_norm.weight"),
    Ignore("*rotary_emb.inv_freq"),
)


def _qkv(part: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}self_attn.{x}_proj.{part}" for x in "qkv")


_FEATURE_RULES = (
    *_COMMON_RULES,
    Rename("fc.embedding.weight", "of_embedding.weight"),
    Rename("fc.feature.weight", "of_feature.weight"),
    Rename("fc.bias", "of_embedding.bias"),
    Stack(_qkv("{p}"), "layer.attention.qkv.{p}"),
    Rename(f"{_LAYER}input_layernorm.weight", "layer.attention_norm.weight"),
)
_FUSING_RULES = (
    *_COMMON_RULES,
    Rename("fc.{p}", "fc.{p}"),
    Rename("norm.weight", "norm.weight"),
    Stack(_qkv("embedding.weight"), "layer.attention.qkv.weight"),
    Stack(_qkv("feature.weight"), "layer.qkv_of_feature.weight"),
    Stack(_qkv("bias"), "layer.attention.qkv.bias"),
    Rename(f"{_LAYER}input_layernorm.weight", "layer.embedding_norm.weight"),
    Rename(f"{_LAYER}hidden_norm.weight", "layer.feature_norm.weight"),
)

_NEEDED = (
    "fc.weight",
    *_qkv("weight"),
    *(f"{_LAYER}{x}.weight" for x in (
        "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "post_attention_layernorm",
    )),
)  # fmt: skip
_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
_NEEDED_FUSING = (f"{_LAYER}hidden_norm.weight", f"{_LAYER}input_layernorm.weight",
                  "norm.weight", "lm_head.weight")  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A head on a disk, found to fit its target."""

    file: Path
    spec: EagleSpec
    ids: Ids | None  # the token of each row of its own head; None: the rows' numbers, or no own
    tensors: dict[str, Tensor]  # by the names that rules know
    decoder: DecoderSpec  # what its config says, as a decoder of one layer

    def fill(self, head: EagleHead) -> None:
        """Give `head`, of this checkpoint's spec, its weights."""
        rules = _FUSING_RULES if self.spec.fuses else _FEATURE_RULES
        family = "eagle3" if self.spec.fuses else "eagle"
        spec = ModelSpec(family, self.decoder, rules, None, None, ())
        try:
            load_weights(head, spec, _Held(self.file, self.tensors))
        except WeightsError as error:
            raise WeightsError(f"{self.file}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Held:
    """Tensors as a `Source`."""

    path: Path
    tensors: dict[str, Tensor]

    @property
    def config(self) -> dict[str, Any]:
        return {}

    def files(self) -> list[Path]:
        return [self.path]

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    def scheme(self, name: str) -> Scheme | None:
        return None

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def open_eagle_checkpoint(
    folder: Path,
    fuses: bool,
    target: Decoder,
    reduced: VocabMap | None = None,
    strict: bool = False,
) -> EagleCheckpoint:
    """The head in `folder`. fuses: an EAGLE-3 head is wanted.

    reduced: of a target with a reduced vocabulary; heads may be of that or of the whole one.
    strict: a config key that nothing reads is an error. Raises an error for a head of the other
    kind, one of another target, and one that isn't whole.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is no folder: a head is in one, with config.json.")
    where = str(folder / "config.json")
    said = read_json(folder / "config.json")
    config = ConfigReader(said, where)
    config.refuse_unbuilt()
    layer = config.nested("transformer_layer_config") or config
    if not any((folder / name).is_file() for name in FILES):
        _check_no_medusa(folder, ())
    file, held = read_tensors(folder, FILES)
    tensors = {short(name): tensor for name, tensor in held.items()}
    _check_kind(file, tensors, fuses)
    whole = _read(layer, where, tensors)
    spec = _spec(config, whole, fuses, target, tensors, file)
    _check_shapes(file, spec, tensors)
    _check_rope(where, spec.layer.attention.rope)
    check_finite(file, held)
    spec, tensors, ids = _vocabularies(file, config, whole, spec, target, tensors, reduced)
    for key in _SAID:
        config.get(key)
        layer.get(key)
    config.only("norm_before_fc", (False,), False)
    config.finish(strict=strict)
    return EagleCheckpoint(file, spec, ids, _split(tensors, spec), whole)


def short(name: str) -> str:
    """A tensor's name, by which all layouts call it."""
    short = name.removeprefix("model.")
    return _LAYER + short.removeprefix("midlayer.") if short.startswith("midlayer.") else short


def are_fusing(names: Container[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 head's."""
    return f"{_LAYER}hidden_norm.weight" in names or "d2t" in names


def _check_kind(file: Path, tensors: dict[str, Tensor], fuses: bool) -> None:
    """A head of the wanted kind, of one layer, with all that it needs."""
    is_fusing = are_fusing(tensors)
    if "fc.weight" not in tensors:
        _check_no_medusa(file.parent, tensors)
        raise WeightsError(
            f"{file} has no fc.weight, where every EAGLE head brings a token's embedding and a "
            f"state together: it is damaged, or no EAGLE head. It has {_some(sorted(tensors))}."
        )
    if is_fusing != fuses:
        kind, method = ("an EAGLE-3", "eagle3") if is_fusing else ("an EAGLE-1 or 2", "eagle")
        raise ConfigError(f"{file.parent} holds {kind} head: set method={method!r}.")
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) > 1:
        raise UnsupportedModelError(
            f"{file} is a head of {len(layers)} layers; heads of one layer are built."
        )
    missing = [x for x in (*_NEEDED, *(_NEEDED_FUSING if fuses else ())) if x not in tensors]
    if missing:
        raise WeightsError(f"{file} lacks {len(missing)} of a head's tensors: {_some(missing)}.")
    for name, tensor in tensors.items():
        if name not in ("d2t", "t2d") and tensor.dtype not in STORED:
            raise WeightsError(
                f"{name!r} in {file} is {tensor.dtype}; float32, bfloat16 and float16 load."
            )


def _check_no_medusa(folder: Path, names: Iterable[str]) -> None:
    if medusa.are_of_medusa(folder, names):
        raise ConfigError(f"{folder} holds Medusa heads, not an EAGLE head: set method='medusa'.")


def _read(layer: ConfigReader, where: str, tensors: dict[str, Tensor]) -> DecoderSpec:
    """What a config says of the layer, with numbers that can be computed with."""
    try:
        whole = decoder(layer, (_layer(layer, tensors),))
    except OverflowError as error:
        raise ConfigError(f"{where} has a number that is too large: {error}.") from error
    eps, held = whole.norm.eps, torch.finfo(torch.float32)
    if not held.tiny <= eps <= held.max:
        raise ConfigError(f"{where}: rms_norm_eps must be above 0, as a float32: {eps}")
    for key in ("attention_bias", "qkv_bias", "bias"):
        if not isinstance(layer.get(key, False), bool):
            raise ConfigError(f"{where}: {key} must be true or false: {layer.get(key)!r}")
    return whole


def _check_rope(where: str, rope: RopeSpec | None) -> None:
    """Raises ConfigError for a rotation whose angles or factor no float32 holds."""
    assert rope is not None  # a Llama's
    try:
        check_rope(rope)
    except ValueError as error:
        raise ConfigError(
            f"{where}: positions can't be rotated by its rope_theta="
            f"{rope.theta} and rope parameters of type {rope.kind!r}: {error}."
        ) from error


def _layer(c: ConfigReader, tensors: dict[str, Tensor]) -> LayerSpec:
    """A Llama's layer; biases are there where the file has them."""
    count = c.integer("num_hidden_layers", 1)
    if count != 1:
        raise UnsupportedModelError(
            f"config.json says num_hidden_layers={count}; heads of one layer are built."
        )
    dim = head_dim(c)
    heads = attention(c, rope(c, dim), dim)
    own = f"{_LAYER}self_attn."
    heads = replace(
        heads, qkv_bias=f"{own}q_proj.bias" in tensors, out_bias=f"{own}o_proj.bias" in tensors
    )
    return LayerSpec(heads, gated_mlp(c))


def _spec(
    config: ConfigReader,
    whole: DecoderSpec,
    fuses: bool,
    target: Decoder,
    tensors: dict[str, Tensor],
    file: Path,
) -> EagleSpec:
    """What the head is made of, its vocabularies aside."""
    hidden, wanted = whole.hidden, target.spec.hidden
    num_layers = len(target.spec.layers)
    states = _states(config, num_layers) if fuses else (num_layers,)
    fc = tensors["fc.weight"]
    held, read = tuple(fc.shape) if fc.dim() == 2 else (hidden, 0)
    own_embedding = "embed_tokens.weight" in tensors
    if hidden != wanted and not (fuses and own_embedding):
        _other_target(file, "a hidden size", hidden, wanted)
    # one of another size may be of this target, but not where it reads states of its own size
    may_differ = fuses and own_embedding and read % wanted == 0 and read != len(states) * held
    if held != wanted and not may_differ:
        _other_target(file, "a hidden size", held, wanted)
    columns = len(states) * wanted + (0 if fuses else hidden)
    if fuses and (config.get("target_hidden_size") or wanted) != wanted:
        _other_target(file, "a hidden size", config.integer("target_hidden_size"), wanted)
    if tuple(fc.shape) != (hidden, columns):
        reads = f"{len(states)} states of {wanted}" if fuses else f"two rows of {hidden}"
        raise WeightsError(
            f"{file}: fc.weight is {list(fc.shape)}, but a head of hidden size {hidden} that reads "
            f"{reads} has [{hidden}, {columns}]. It is of another target, or reads other layers."
        )
    return EagleSpec(
        fuses=fuses,
        hidden=hidden,
        layer=whole.layers[0],
        norm=whole.norm,
        vocab_size=target.spec.vocab_size,
        states=states,
        target_hidden=wanted,
        own_embedding=own_embedding,
        fc_bias="fc.bias" in tensors,
        input_norm=f"{_LAYER}input_layernorm.weight" in tensors,
        residual_is_normed=config.flag("norm_before_residual", False),
    )


def _check_shapes(file: Path, spec: EagleSpec, tensors: dict[str, Tensor]) -> None:
    """Every tensor is as config.json says, before anything of a size that it says is made."""
    own, mlp = spec.layer.attention, spec.layer.mlp
    hidden, inner = spec.hidden, mlp.intermediate
    q, kv = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    read = (2 if spec.fuses else 1) * hidden
    wanted: dict[str, tuple[int | None, ...]] = {
        **dict(zip(_qkv("weight"), ((q, read), (kv, read), (kv, read)), strict=True)),
        **dict(zip(_qkv("bias"), ((q,), (kv,), (kv,)), strict=True)),
        f"{_LAYER}self_attn.o_proj.weight": (hidden, q),
        f"{_LAYER}self_attn.o_proj.bias": (hidden,),
        f"{_LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.down_proj.weight": (hidden, inner),
        **{f"{_LAYER}{x}.weight": (hidden,) for x in _NORMS},
        "norm.weight": (hidden,),
        "fc.bias": (hidden,),
        "embed_tokens.weight": (None, hidden),  # rows are looked at by `_vocabularies`
        "lm_head.weight": (None, hidden),
        "t2d": (None,),
    }
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        fits = wanted.get(name, shape)
        if len(shape) != len(fits) or any(
            b not in (None, a) for a, b in zip(shape, fits, strict=True)
        ):
            shown = ", ".join("any" if size is None else str(size) for size in fits)
            raise WeightsError(
                f"{file}: {name} is {list(shape)}, but by config.json, with hidden_size={hidden}, "
                f"intermediate_size={inner} and {own.num_heads} heads, {own.num_kv_heads} of keys, "
                f"of {own.head_dim}, it is [{shown}]. It is of another head, or config.json is."
            )


def _states(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads; num_layers: what the final norm reads."""
    nested = config.nested("eagle_config")
    found: Any = config.get(_AUX_LAYERS)
    if nested is not None:
        nested.only("use_aux_hidden_state", (True,), True)
        outputs = nested.get(_AUX_LAYERS)
        if not found and _are_ints(outputs):
            found = [layer + 1 for layer in outputs]
    if not found:
        found = [2, num_layers // 2, num_layers - 3]
    if (
        not _are_ints(found)
        or len(set(found)) < len(found)
        or not all(0 <= layer <= num_layers for layer in found)
    ):
        raise ConfigError(
            f"The head reads the inputs of layers {found!r}, and the target has {num_layers}: "
            f"{_AUX_LAYERS} in its config.json must name different ones, from 0 to {num_layers}."
        )
    return tuple(found)


def _are_ints(found: Any) -> bool:
    return isinstance(found, list) and all(type(layer) is int for layer in found) and bool(found)


def _vocabularies(
    file: Path,
    config: ConfigReader,
    whole: DecoderSpec,
    spec: EagleSpec,
    target: Decoder,
    tensors: dict[str, Tensor],
    reduced: VocabMap | None,
) -> tuple[EagleSpec, dict[str, Tensor], Ids | None]:
    """The head's tables in the target's ids: rows of tokens that it lacks are left out."""
    rows = target.spec.vocab_size  # of the target's embedding
    size = rows if reduced is None else reduced.original_size
    narrow = reduced is not None and whole.vocab_size == rows  # trained for the reduced target
    if whole.vocab_size != size and not narrow:
        _other_target(file, "a vocabulary", whole.vocab_size, size)
    tensors = dict(tensors)
    added, marked = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if marked is not None and len(marked) != whole.vocab_size:
        _other_target(file, "a vocabulary", len(marked), whole.vocab_size)
    table = tensors.get("embed_tokens.weight")
    if table is not None:
        if len(table) != whole.vocab_size:
            _other_target(file, "a vocabulary", len(table), whole.vocab_size)
        if reduced is not None and not narrow:
            table = tensors["embed_tokens.weight"] = table[torch.from_numpy(reduced.kept).long()]
        if _is_targets(table, target):
            del tensors["embed_tokens.weight"]
            spec = replace(spec, own_embedding=False)
    head = tensors.get("lm_head.weight")
    said = config.integer("draft_vocab_size", whole.vocab_size if head is None else len(head))
    if head is None:
        return spec, tensors, None
    if said != len(head):
        raise WeightsError(
            f"{file}: lm_head.weight has {len(head):,} rows, but config.json says "
            f"draft_vocab_size={said:,}."
        )
    ids = _ids(file, len(head), added, whole.vocab_size)
    if reduced is not None and narrow:
        ids = np.asarray(reduced.kept, dtype=np.int64)[ids]
    elif reduced is not None:
        there = reduced.new[ids] >= 0
        ids, tensors["lm_head.weight"] = ids[there], head[torch.from_numpy(there)]
    count = len(tensors["lm_head.weight"])
    same = count == size and bool((ids == np.arange(count)).all())
    return replace(spec, head_size=count), tensors, None if same else ids


def _ids(file: Path, rows: int, added: Tensor | None, size: int) -> Ids:
    """The token of each row of the head."""
    ids = np.arange(rows, dtype=np.int64)
    if added is None:
        if rows != size:
            raise WeightsError(
                f"{file} lacks d2t, which says for which of {size:,} tokens the {rows:,} rows of "
                "lm_head.weight stand."
            )
        return ids
    offsets = as_ids(file, "d2t", added)
    if len(offsets) != rows:
        raise WeightsError(
            f"{file}: d2t is of {len(offsets):,} rows, but lm_head.weight has {rows:,}."
        )
    ids += offsets
    check_ids(file, "d2t", ids, size)
    return ids


def _is_targets(table: Tensor, target: Decoder) -> bool:
    """Whether a table is what the target's embedding gives: then it needn't be held twice."""
    if table.shape[1] != target.spec.hidden:
        return False
    embed = target_embedding(target)
    with torch.inference_mode():
        for start in range(0, len(table), 4096):
            part = table[start : start + 4096]
            ids = torch.arange(start, start + len(part), dtype=torch.int32)
            if not torch.equal(embed(ids), part.to(target.dtype)):
                return False
    return True


def _split(tensors: dict[str, Tensor], spec: EagleSpec) -> dict[str, Tensor]:
    """Matrices over two rows side by side as one for each."""
    found = dict(tensors)
    names = _qkv("weight") if spec.fuses else ("fc.weight",)
    for name in names:
        matrix = found.pop(name)
        stem = name.removesuffix("weight")
        found[f"{stem}embedding.weight"] = matrix[:, : spec.hidden].contiguous()
        found[f"{stem}feature.weight"] = matrix[:, spec.hidden :].contiguous()
    return found


def _other_target(file: Path, what: str, held: int, wanted: int) -> NoReturn:
    raise ConfigError(
        f"The head in {file.parent} was made for {what} of {held:,}, and the target has one of "
        f"{wanted:,}. Choose a head that was trained for this model."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

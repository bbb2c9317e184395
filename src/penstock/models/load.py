"""From a checkpoint's folder to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from penstock.hardware import detect
from penstock.kernels import native
from penstock.models.activations import ACTIVATIONS, Activated, Widened
from penstock.models.checkpoint import Source
from penstock.models.dummy import fill_with_noise
from penstock.models.gguf.source import GgufSource
from penstock.models.reach import FURTHEST, USUAL, with_reach
from penstock.models.registry import read_json, read_spec
from penstock.models.sources import open_model, read_generation, stored_quantization
from penstock.models.spec import ModelSpec
from penstock.models.weights import Progress, Stored, load_weights, stored_formats
from penstock.nn import Decoder, DecoderSpec, RopeSpec
from penstock.nn.parameters import Loadable
from penstock.parallel import Ranks, Ring
from penstock.quant import PANELS, Storage, WeightFormats, formats_of

logger = logging.getLogger(__name__)

_TABLE_BYTES = 20
"""Of a rotary table's value while it is computed, in float64."""

CPU = torch.device("cpu")

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights, and what its folder says about using it."""

    model: Decoder
    spec: ModelSpec
    dtype: torch.dtype  # of weights and activations
    max_model_len: int  # tokens
    generation: dict[str, Any]  # generation_config.json; empty where there is none
    eos_token_ids: tuple[int, ...]  # of generation_config.json, or else of config.json
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a checkpoint, by the
    # parameters that they became; empty where there was none


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its folder and what was asked for describe it, before a weight is read."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype  # of activations, and of weights that aren't quantized
    formats: WeightFormats
    max_model_len: int  # tokens
    source: Source | None  # of the weights; None: they are random
    generation: dict[str, Any]  # generation_config.json's, or a file's own; of no weights: empty

    def decoder(self, ranks: Ranks | Ring | None = None) -> Decoder:
        """The model without its weights; ranks: of processes that have a part of it each. Raises
        ConfigError where its tables don't fit.
        """
        _check_tables(self.spec.decoder, self.max_model_len)
        return Decoder(self.spec.decoder, self.formats, self.dtype, self.max_model_len, ranks)

    def loaded(
        self, model: Decoder, tensors: Mapping[str, tuple[str, ...]] | None = None
    ) -> LoadedModel:
        """With the model that has come out of it, and what its parameters were made of."""
        decoder = self.spec.decoder
        _note_longrope(decoder, min(self.max_model_len, decoder.reach or self.max_model_len))
        stops = stop_ids(self.spec, self.generation, self.folder)
        return LoadedModel(
            model.eval(), self.spec, self.dtype, self.max_model_len, self.generation, stops,
            tensors or {},
        )  # fmt: skip


class Asked(TypedDict, total=False):
    """What may be asked of a model, by name, whether it is described or loaded.

    dtype: "auto" is the checkpoint's own. max_model_len: None is what the model was made for; it
    sizes the rotary tables and, for longrope, chooses between the short and the long factors.
    strict: a config key that nothing reads is an error instead of a warning. quantization: round
    the weights to `w8a8`, `w4a16-g64`, … as they are read (`quant.names`); of a checkpoint that is
    quantized already, `a8` or `a16`: what activations are rounded to. storage: how weights lie in
    memory. max_attention_window, sink_token_length: of `models.reach`; None: all is seen. mmproj:
    the projector of a GGUF file, through which it sees.
    """

    dtype: str
    max_model_len: int | None
    strict: bool
    quantization: str | None
    storage: Storage
    max_attention_window: int | None
    sink_token_length: int | None
    mmproj: Path | None


def describe(
    folder: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    strict: bool = False,
    quantization: str | None = None,
    storage: Storage = PANELS,
    max_attention_window: int | None = None,
    sink_token_length: int | None = None,
    mmproj: Path | None = None,
    dummy: bool = False,
) -> Description:
    """What `load_model` would load, by its headers: arguments as `Asked` has them.

    dummy: what `load_dummy` would make, by config.json alone.
    """
    _check_storage(quantization, storage)
    checkpoint: Source | None = None
    generation: dict[str, Any] = {}
    if dummy:
        spec, chosen, formats = _shape(folder, dtype, strict, quantization)
    else:
        if not folder.exists():
            raise ModelNotFoundError(f"There is no folder and no file {folder}.")
        spec, found = open_model(folder, strict=strict, mmproj=mmproj)
        generation = read_generation(found)
        checkpoint, rounded = _over(found, dtype, quantization)
        chosen, formats = chosen_formats(spec, checkpoint, dtype, rounded)
    length = _length(max_model_len, spec.decoder, max_attention_window is not None)
    if max_attention_window is not None:
        positions = max_positions(spec.decoder)
        spec = with_reach(spec, max_attention_window, sink_token_length, positions, length)
    formats = formats.stored_as(storage)
    return Description(folder, spec, chosen, formats, length, checkpoint, generation)


def _over(found: Source, dtype: str, quantization: str | None) -> tuple[Source, str | None]:
    """A source as what was asked changes it, and what its weights are then rounded to."""
    if quantization in ACTIVATIONS:
        return Activated(found, quantization), None
    if dtype in ("float32", "float") and isinstance(found, GgufSource) and found.quantization:
        return Widened(found), quantization
    return found, quantization


_LIKE = {"awq": "w4a16-g128-asym", "fp8": "fp8", "mxfp4": "mxfp4", "bitsandbytes": "nf4"}
"""Formats like those of other tools, by `quant_method`; others are as GPTQ's."""


def _shape(
    folder: Path, dtype: str, strict: bool, quantization: str | None
) -> tuple[ModelSpec, torch.dtype, WeightFormats]:
    """What config.json says; in bfloat16 where it names no dtype."""
    if folder.is_file():
        raise ConfigError(
            f"load_format='dummy' reads a folder's config.json, but {folder} is a file. Leave "
            "load_format out, or give a folder."
        )
    spec = read_spec(folder, strict=strict)
    quantized = read_json(folder / "config.json").get("quantization_config")
    if quantized is not None and quantization is None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ConfigError(
            f"{folder}/config.json says that its weights are quantized ({method}); how shows in "
            "those alone, which aren't read here. Choose a format that stands for it: "
            f"quantization={_LIKE.get(str(method), 'w4a16-g128')!r}."
        )
    name = (spec.dtype or "bfloat16") if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise _unknown_dtype(name)
    chosen = _DTYPES[name]
    if quantization is not None and dtype != "auto":
        _check_rounded(quantization, dtype)
    if quantization is not None or chosen is torch.float16:
        chosen = torch.bfloat16
    return spec, chosen, formats_of(quantization, chosen)


def load_model(
    folder: Path,
    *,
    progress: Progress | None = None,
    stored: Stored | None = None,
    device: torch.device = CPU,
    ranks: Ranks | Ring | None = None,
    **asked: Unpack[Asked],
) -> LoadedModel:
    """Read the checkpoint in `folder`, or the GGUF file of that path.

    stored: takes each tensor away once it is packed; memory is then not looked at beforehand.
    device: where weights are to be, in the end. ranks: keep the part of this one.
    """
    found = describe(folder, **asked)
    assert found.source is not None  # one that is described by its files
    model = found.decoder(ranks)
    if stored is None:  # on their way to a GPU they are here, too
        _check_memory(model, found, min(_free(CPU), _free(device)))
    tensors = load_weights(model, found.spec, found.source, progress, stored)
    if device != CPU:
        model.to(device)
    return found.loaded(model, tensors)


def load_dummy(
    folder: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    device: torch.device = CPU,
    **asked: Unpack[Asked],
) -> LoadedModel:
    """A model of the shape that `folder`'s config.json has, of random weights made on `device`."""
    found = describe(folder, dummy=True, **asked)
    model = found.decoder()
    _check_memory(model, found, _free(device))
    model.to(device)
    fill_with_noise(model, found.dtype, device, seed, progress)
    return found.loaded(model)


def weight_bytes(model: Decoder) -> int:
    """What its weights take once they are there; its rotary tables already are."""
    modules = (m for m in model.modules() if isinstance(m, Loadable) and not m.elsewhere)
    return sum(m.nbytes for m in modules)


def chosen_formats(
    spec: ModelSpec, checkpoint: Source, dtype: str = "auto", quantization: str | None = None
) -> tuple[torch.dtype, WeightFormats]:
    """What the model computes in, and its matrices' formats, as `load_model` chooses them.

    Raises ConfigError for choices that can't take effect.
    """
    chosen = _dtype(dtype, spec, checkpoint)
    own = stored_quantization(checkpoint)
    if own is not None and quantization is not None:
        raise ConfigError(
            f"{checkpoint.path} is quantized already ({own}), so quantization={quantization!r} "
            "can't take effect. Leave it out, say a8 or a16 to choose what activations are rounded "
            "to, or give the unquantized checkpoint."
        )
    kept = any(checkpoint.scheme(name) is not None for name in checkpoint.names())
    rounded = quantization or (own if kept else None)
    if rounded is not None and chosen is not torch.bfloat16:
        if dtype != "auto" and quantization is None:
            raise ConfigError(
                f"{checkpoint.path} is quantized ({rounded}) and computes in bfloat16, so "
                f"dtype={dtype!r} can't take effect. Leave it out."
            )
        if dtype != "auto":
            _check_rounded(rounded, dtype)
        logger.info("The checkpoint is %s; quantized, it runs in bfloat16.", chosen)
        chosen = torch.bfloat16
    if quantization is not None:
        return chosen, formats_of(quantization, chosen)
    return chosen, stored_formats(spec, checkpoint, chosen)


def _check_storage(quantization: str | None, storage: Storage) -> None:
    """Raises ConfigError for activations that a GPU's products don't have."""
    in_blocks = quantization is not None and quantization.endswith("-blocks")
    if storage != PANELS and (in_blocks or quantization == "a8"):
        raise ConfigError(
            f"quantization={quantization!r} rounds activations to int8 in blocks, which isn't "
            "built for GPUs. Leave it out, choose another format, or device='cpu'."
        )


def _unknown_dtype(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json says dtype {name!r}; float32, bfloat16 and float16 load."
    )


def _check_rounded(quantization: str, dtype: str) -> None:
    """Raises ConfigError for a dtype that weights rounded on load aren't computed with."""
    if _DTYPES.get(dtype) is not torch.bfloat16:
        raise ConfigError(
            f"quantization={quantization!r} computes in bfloat16 beside integers, so "
            f"dtype={dtype!r} can't take effect. Leave one of them out."
        )


def _dtype(asked: str, spec: ModelSpec, checkpoint: Source) -> torch.dtype:
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(f"dtype={asked!r} isn't one of auto, {', '.join(_DTYPES)}.")
        if _DTYPES[asked] is torch.float16 and native.handle is not None:
            raise ConfigError(
                f"dtype={asked!r}: no kernel computes in float16. 'bfloat16' has three bits less "
                "of each value, 'float32' every bit in twice the bytes. PENSTOCK_KERNELS=reference "
                "computes in it, in Python, to see what it changes."
            )
        return _DTYPES[asked]
    if spec.dtype is None:
        own = checkpoint.dtype()
    elif spec.dtype in _DTYPES:
        own = _DTYPES[spec.dtype]
    else:
        raise _unknown_dtype(spec.dtype)
    if own is torch.float16:
        logger.warning(
            "The checkpoint is float16, which no kernel computes in: it runs in bfloat16, whose "
            "values have three bits less. dtype='float32' keeps every bit of its weights."
        )
        return torch.bfloat16
    return own


def _check_memory(model: Decoder, found: Description, free: int) -> None:
    """Refuse weights that can't fit before reading or making them."""
    need, formats = weight_bytes(model), found.formats
    if model.is_shared_here:  # the first asks for all of them, which load at the same time
        need = weight_bytes(Decoder(found.spec.decoder, formats, found.dtype, 1))
        need *= model.is_first
    elif model.copies_here > 1:
        need *= model.copies_here * model.is_first
    if need <= free:
        return
    ways = ["free some memory", "use a smaller model"]
    if formats.matrix.name in ("float32", "bfloat16"):
        ways.insert(0, "round them by quantization='w8a8' or 'w4a8'")
    if found.dtype is torch.float32:
        ways.insert(0, "halve them by dtype='bfloat16'")
    raise ConfigError(
        f"The weights need {_size(need)} in {formats.name}, but {_size(free)} of memory are free: "
        f"{', '.join(ways[:-1])} or {ways[-1]}."
    )


def _check_tables(decoder: DecoderSpec, length: int) -> None:
    """Refuse more positions than there is memory to make rotary tables for."""
    ropes = [layer.attention.rope for layer in decoder.layers if layer.attention.rope is not None]
    need = max((rope.rotary_dim for rope in ropes), default=0) * length * _TABLE_BYTES
    free = _free(CPU)
    if need > free:
        raise ConfigError(
            f"The rotary tables of {length:,} positions need {_size(need)} while they are made, "
            f"but {_size(free)} of memory are free: set a lower max_model_len."
        )


def _note_longrope(decoder: DecoderSpec, length: int) -> None:
    """Say where short prompts get other numbers than in transformers, which looks at each."""
    ropes = [layer.attention.rope for layer in decoder.layers if layer.attention.rope is not None]
    short = min((r.original_max_position for r in ropes if r.kind == "longrope"), default=length)
    if length > short:
        logger.warning(
            "max_model_len=%d is more than the %d positions of this model's short rope factors: "
            "prompts of every length get the long ones. Set max_model_len to at most %d for the "
            "numbers that transformers gives for short prompts.",
            length, short, short,
        )  # fmt: skip


def _free(device: torch.device) -> int:
    """Bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return detect().available_bytes


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _length(asked: int | None, decoder: DecoderSpec, forgets: bool = False) -> int:
    """forgets: texts may be longer than what is seen of them."""
    if asked is None:
        return max(decoder.max_position, USUAL if forgets else 0)
    longest = FURTHEST if forgets else max_positions(decoder)
    if asked > longest and forgets:
        raise ConfigError(f"max_model_len={asked} is more than {longest}. Lower it.")
    if asked > longest:
        raise ConfigError(
            f"max_model_len={asked} is more than the {longest} positions that the model was made "
            f"for. Lower it, set a max_attention_window, or scale its rope in config.json."
        )
    if asked < 1:
        raise ConfigError(f"max_model_len must be a positive integer, not {asked}.")
    return asked


def max_positions(decoder: DecoderSpec) -> int:
    """How many positions the model can tell apart: made for, or what its rope is scaled to."""
    if decoder.learned_positions:
        return decoder.learned_positions
    ropes = [layer.attention.rope for layer in decoder.layers if layer.attention.rope is not None]
    reach = [_reach(rope, decoder.max_position) for rope in ropes]
    return max(decoder.max_position, min(reach, default=0))


def _reach(rope: RopeSpec, max_position: int) -> int:
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    if rope.kind in ("yarn", "longrope"):
        return int(rope.original_max_position * rope.factor)
    return max_position  # llama3's factor isn't the ratio of two contexts


def stop_ids(spec: ModelSpec, generation: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """The tokens that end a text: generation_config.json's where it has some, or config.json's.

    A warning names those that the model can't give.
    """
    more = generation.get("eos_token_id")
    listed: list[Any] = more if isinstance(more, list) else [more]
    if more is None:
        listed = list(spec.eos_token_ids)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        file = folder / "generation_config.json"
        raise UnsupportedModelError(f"{file}: eos_token_id must be integers: {more!r}")
    size = spec.decoder.vocab_size
    outside = [i for i in listed if not 0 <= i < size]
    if outside:
        logger.warning(
            "%s: eos_token_id %s isn't in the vocabulary of %d tokens, so that it ends no text.",
            folder, ", ".join(map(str, outside)), size,
        )  # fmt: skip
    return tuple(dict.fromkeys(i for i in listed if 0 <= i < size))

"""From a path to the tensors in it, and to its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.models.checkpoint import Checkpoint, Source
from penstock.models.experts import SplitExperts, are_in_turns, has_joined_experts, hidden_beside
from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.seeing import SeeingSource
from penstock.models.gguf.source import GgufSource
from penstock.models.gguf.tokenizer import gguf_tokenizer
from penstock.models.over import Over
from penstock.models.quantized import QuantizedCheckpoint
from penstock.models.registry import read_config, read_json, read_spec, spec_of
from penstock.models.spec import ModelSpec
from penstock.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NOT_APPLIED = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
)
"""Of `generation_config.json`: what changes the logits in transformers."""

Stored = Checkpoint | QuantizedCheckpoint | GgufSource | SplitExperts
"""What lies on a disk: `stored_as(name)` says how."""


def open_source(path: Path, mmproj: Path | None = None) -> Stored:
    """The source in `path`: a GGUF file, or safetensors, quantized as config.json says.

    mmproj: the projector of a GGUF file, through which it sees.
    """
    if is_gguf(path):
        source = GgufSource(path) if mmproj is None else SeeingSource(path, mmproj)
        source.announce()
        return source
    config = read_config(path)
    checkpoint = _in_folder(path, config.get("quantization_config"))
    if not has_joined_experts(checkpoint):
        return checkpoint
    return SplitExperts(checkpoint, in_turns=are_in_turns(config), hidden=hidden_beside(config))


def _in_folder(path: Path, quantization: Any) -> Checkpoint | QuantizedCheckpoint:
    checkpoint = Checkpoint(path)
    if not quantization:
        return checkpoint
    if not isinstance(quantization, dict):
        raise UnsupportedModelError(f"quantization_config must be an object: {quantization!r}")
    return QuantizedCheckpoint(checkpoint, quantization)


def open_model(
    path: Path, *, strict: bool = False, mmproj: Path | None = None
) -> tuple[ModelSpec, Stored]:
    """What `path` describes, and its tensors; a folder's config is wrong before its weights are.

    mmproj: as `open_source` takes it.
    """
    if is_gguf(path):
        source = open_source(path, mmproj)
        return spec_of(source.config, str(path), strict=strict), source
    return read_spec(path, strict=strict), open_source(path)


def stored_quantization(source: Source) -> str | None:
    """What `source` is quantized to, by its own name; None where its matrices aren't."""
    while isinstance(source, Over):
        source = source.base
    if isinstance(source, GgufSource):
        return source.quantization
    schemes = map(source.scheme, source.names())
    return next((scheme.name for scheme in schemes if scheme is not None), None)


def read_generation(source: Source) -> dict[str, Any]:
    """`generation_config.json`, or what a file says in its stead; {} where nothing does."""
    return source.generation if isinstance(source, GgufSource) else generation_in(source.path)


def generation_in(folder: Path) -> dict[str, Any]:
    """A folder's `generation_config.json`; {} where there is none. Warns of what isn't applied."""
    file = folder / "generation_config.json"
    found = read_json(file) if file.exists() else {}
    idle = [key for key in _NOT_APPLIED if found.get(key)]
    if idle:
        logger.warning(
            "%s sets %s, which isn't applied. Give requests what is like it (bad_words, "
            "logit_bias), or take it out.",
            file, ", ".join(idle),
        )  # fmt: skip
    return found


def open_tokenizer(path: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model's folder or GGUF file; see `Tokenizer.from_folder`."""
    if is_gguf(path):
        return gguf_tokenizer(path, vocab_size=vocab_size)
    return Tokenizer.from_folder(path, vocab_size=vocab_size)

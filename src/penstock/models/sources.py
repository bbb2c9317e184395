"""From a path to the tensors in it, and to its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.source import GgufSource
from penstock.models.gguf.tokenizer import gguf_tokenizer
from penstock.models.registry import read_json, read_spec, spec_of
from penstock.models.spec import ModelSpec
from penstock.models.weights import Checkpoint, Source
from penstock.tokenizer import Tokenizer


def open_source(path: Path) -> Source:
    """The source in `path`: a folder's safetensors, or a GGUF file."""
    if is_gguf(path):
        source = GgufSource(path)
        source.announce()
        return source
    return Checkpoint(path)


def open_model(path: Path, *, strict: bool = False) -> tuple[ModelSpec, Source]:
    """What `path` describes, and its tensors; a folder's config is wrong before its weights are."""
    if is_gguf(path):
        source = open_source(path)
        return spec_of(source.config, str(path), strict=strict), source
    return read_spec(path, strict=strict), open_source(path)


def stored_quantization(source: Source) -> str | None:
    """What `source` is quantized to, by its own name; None where its matrices aren't."""
    if isinstance(source, GgufSource):
        return source.quantization
    schemes = map(source.scheme, source.names())
    return next((scheme.name for scheme in schemes if scheme is not None), None)


def read_generation(source: Source) -> dict[str, Any]:
    """`generation_config.json`, or what a file says in its stead; {} where nothing does."""
    if isinstance(source, GgufSource):
        return source.generation
    file = source.path / "generation_config.json"
    return read_json(file) if file.exists() else {}


def open_tokenizer(path: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model's folder or GGUF file; see `Tokenizer.from_folder`."""
    if is_gguf(path):
        return gguf_tokenizer(path, vocab_size=vocab_size)
    return Tokenizer.from_folder(path, vocab_size=vocab_size)

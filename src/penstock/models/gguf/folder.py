"""A GGUF file as a checkpoint's folder: `config.json`, tokenizer, tensors by a family's names."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import TokenizerError
from penstock.models.gguf.seeing import SeeingSource
from penstock.models.gguf.source import GgufSource
from penstock.models.gguf.tokenizer import write_tokenizer
from penstock.quant import Codes
from penstock.quant.files import write_checkpoint

logger = logging.getLogger("penstock")


def write_settings(source: GgufSource, folder: Path, *, but: Collection[str] = ()) -> None:
    """Write what a folder has beside its weights, here and for transformers.

    A tokenizer that is missing or isn't built is left out, and a warning says why.
    but: `config.json`, where it isn't to be written.
    """
    if "config.json" not in but:
        _write(folder / "config.json", source.config)
    tokens = {name: source.config[name] for name in ("bos_token_id", "eos_token_id")}
    if isinstance(source, SeeingSource):
        _write(folder / "preprocessor_config.json", source.processor)
    sampled = {"do_sample": True} if source.generation else {}
    _write(folder / "generation_config.json", {**tokens, **sampled, **source.generation})
    try:
        write_tokenizer(source.path, folder)
    except TokenizerError as error:
        logger.warning("%s No tokenizer is written.", error)


def write_weights(source: GgufSource, folder: Path) -> None:
    """Write the weights and `config.json` into the empty `folder`.

    Matrices that a scheme holds keep their codes, in compressed-tensors' layout; K-quants, which it
    hasn't, and what is widened are stored in bfloat16, the rest as it is. An embedding is widened
    too, as other engines look rows up in plain tables alone; the head tied to it becomes a matrix
    of its own, with the codes.
    """
    config, untied = dict(source.config), None
    table = source.scheme(source.table)
    if config["tie_word_embeddings"] and table is not None and not table.is_k:
        config["tie_word_embeddings"], untied = False, source.head
    write_checkpoint(folder, config, _tensors(source, untied))


def _tensors(source: GgufSource, untied: str | None) -> Iterator[tuple[str, Tensor | Codes]]:
    """All tensors, the table also under the name `untied` where there is one."""
    for name in source.names():
        found = source.read(name)
        if isinstance(found, Codes):
            found = replace(found, scheme=found.scheme.stored)
            if name == source.table and untied is not None:
                yield untied, found
            if name == source.table or found.scheme.is_k:
                found = found.dequantize().bfloat16()
        elif isinstance(found, Tensor) and source.is_widened(name):
            found = found.bfloat16()
        yield name, found


def _write(file: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")

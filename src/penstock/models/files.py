"""The files of a model's folder beside its weights: configs, tokenizer, templates, licence."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.folder import write_settings
from penstock.models.gguf.seeing import SeeingSource
from penstock.models.gguf.source import GgufSource
from penstock.tokenizer.vocab_map import FILE as VOCAB_MAP

INDEX = "model.safetensors.index.json"
"""Of weights in several files, beside which it belongs."""

SETTINGS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""What a model is run by."""

_BESIDE = (*SETTINGS, VOCAB_MAP, "LICENSE*", "README.md", "additional_chat_templates/*")


def copy_settings(
    source: Path, folder: Path, *, but: Collection[str] = (), mmproj: Path | None = None
) -> None:
    """Put what the model in `source` has beside its weights into `folder`.

    Of a GGUF file its metadata, as such files. but: names of files that are left out. mmproj: the
    projector of a GGUF file, whose metadata comes as well.
    """
    if is_gguf(source):
        found = GgufSource(source) if mmproj is None else SeeingSource(source, mmproj)
        write_settings(found, folder, but=but)
        return
    left_out = {INDEX, *but}
    for pattern in _BESIDE:
        for file in sorted(source.glob(pattern)):
            name = file.relative_to(source)
            if file.is_file() and str(name) not in left_out:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)

"""What decides the bits of keys and values: a digest by which other processes' are known to fit."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.models.load import LoadedModel
from penstock.models.vision.pictures import Scaling

VERSION = 3
"""Of what is computed: raised when the kernels give other bits, or blocks lie otherwise."""
SAMPLES, SAMPLE = 64, 1 << 16
"""Pieces of a file of weights that are read, and bytes of each."""


def identity(
    folder: Path,
    loaded: LoadedModel,
    layout: PagedLayout,
    dummy_seed: int | None,
    device: str,
    scaling: Scaling | None = None,
    projector: Path | None = None,
) -> str:
    """Of a model as it was loaded and the cache that it fills.

    Weights are known by their files' names, sizes, times and samples of what is in them: to read
    them all would take as long as loading. dummy_seed: of random ones, which lie in no file.
    device: what computes, and in what order. scaling: of pictures, which are told apart by their
    bytes before it; projector: a file of its own that they go through.
    """
    found = hashlib.sha256()
    spec = loaded.spec
    parts = [
        VERSION,
        spec.family,
        spec.decoder,
        loaded.model.formats.described,
        loaded.dtype,
        layout,
        native.handle is None,  # the reference's sums are in another order
        dummy_seed,
        device,
        scaling,
    ]
    ropes = {layer.attention.rope for layer in spec.decoder.layers}
    if any(rope is not None and rope.kind == "longrope" for rope in ropes):
        parts.append(loaded.max_model_len)  # which chooses among its factors
    found.update(repr(parts).encode())
    if dummy_seed is None:
        for path in (folder, projector):
            for piece in () if path is None else _weights(path):
                found.update(piece)
    return found.hexdigest()[:32]


def weights_digest(folder: Path) -> str:
    """Of a model's weights, wherever its folder is."""
    found = hashlib.sha256()
    for piece in _weights(folder, timed=False):
        found.update(piece)
    return found.hexdigest()[:32]


def _weights(folder: Path, timed: bool = True) -> Iterator[bytes]:
    """What the files of weights are known by; timed: also when they were written."""
    kinds = ("*.safetensors", "*.gguf", "weights.bin", "adapter_config.json")
    if folder.is_file():
        pattern = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", glob.escape(folder.name))
        files = sorted(folder.parent.glob(pattern))  # all parts of one that is split
    else:
        files = sorted(f for kind in kinds for f in folder.glob(kind))
    for file in files:
        stat = file.stat()
        yield f"{file.name} {stat.st_size} {stat.st_mtime_ns if timed else ''}".encode()
        with open(file, "rb") as opened:
            for number in range(SAMPLES):
                opened.seek(stat.st_size * number // SAMPLES)
                yield opened.read(SAMPLE)
            opened.seek(max(stat.st_size - SAMPLE, 0), os.SEEK_SET)
            yield opened.read(SAMPLE)

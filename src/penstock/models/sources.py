"""From a path to the tensors in it."""

from __future__ import annotations

from pathlib import Path

from penstock.models.weights import Checkpoint, Source


def open_source(path: Path) -> Source:
    """The source in `path`: a folder's safetensors."""
    return Checkpoint(path)

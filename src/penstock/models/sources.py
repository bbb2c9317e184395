"""From a path to the tensors in it."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UnsupportedModelError
from penstock.models.quantized import QuantizedCheckpoint
from penstock.models.registry import read_config
from penstock.models.weights import Checkpoint, Source


def open_source(path: Path) -> Source:
    """The source in `path`: a folder's safetensors, plain or quantized as config.json says."""
    checkpoint = Checkpoint(path)
    config = read_config(path).get("quantization_config")
    if not config:
        return checkpoint
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"quantization_config must be an object: {config!r}")
    return QuantizedCheckpoint(checkpoint, config)

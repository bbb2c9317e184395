"""The embedded default model, as its files have it: what tests of it count by."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.models.hub import resolve

STORIES = resolve("stories")
CONFIG = json.loads((STORIES / "config.json").read_text())
VOCAB, HIDDEN = CONFIG["vocab_size"], CONFIG["hidden_size"]
LAYERS, POSITIONS = CONFIG["num_hidden_layers"], CONFIG["max_position_embeddings"]
MATRICES = 4 * LAYERS  # qkv, out, gate with up, down

with safe_open(STORIES / "model.safetensors", framework="pt") as _file:
    _SHAPES = [_file.get_slice(name).get_shape() for name in sorted(_file.keys())]
PARAMETERS = sum(map(math.prod, _SHAPES))


def shallow(folder: Path, layers: int = 2) -> Path:
    """The first layers of it as a model of their own in `folder`, for what is slow by layers."""
    shutil.copytree(STORIES, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    left_out = tuple(f"model.layers.{i}." for i in range(layers, LAYERS))
    file = folder / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items() if not n.startswith(left_out)}
    save_file(tensors, file, {"format": "pt"})
    return folder

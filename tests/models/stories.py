"""The embedded default model, as its files have it: what tests of it count by."""

from __future__ import annotations

import json
import math

from safetensors import safe_open

from penstock.models.hub import resolve

STORIES = resolve("stories")
CONFIG = json.loads((STORIES / "config.json").read_text())
VOCAB, HIDDEN = CONFIG["vocab_size"], CONFIG["hidden_size"]
LAYERS, POSITIONS = CONFIG["num_hidden_layers"], CONFIG["max_position_embeddings"]
MATRICES = 4 * LAYERS  # qkv, out, gate with up, down

with safe_open(STORIES / "model.safetensors", framework="pt") as _file:
    _SHAPES = [_file.get_slice(name).get_shape() for name in sorted(_file.keys())]
PARAMETERS = sum(map(math.prod, _SHAPES))

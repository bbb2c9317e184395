"""Adapters as PEFT writes them, of random matrices."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, ABOUT = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    shapes: Iterable[tuple[str, tuple[int, int]]],
    rank: int = 4,
    seed: int = 0,
    scale: float = 2.0,
    **config: Any,
) -> dict[str, Tensor]:
    """An adapter of these matrices, modules' names and [N, K]; what it adds to each, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors, change = {}, {}
    for name, (n, k) in shapes:
        a = torch.randn(rank, k, generator=random) / k**0.5
        b = torch.randn(n, rank, generator=random) / rank**0.5
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        change[name] = scale * (b @ a)
    save_file(tensors, folder / WEIGHTS)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, **config}
    (folder / ABOUT).write_text(json.dumps(about))
    return change

"""Medusa heads of random weights, written in each public layout, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

Layout = Literal["safetensors", "pt", "prefixed", "vllm", "vllm-bin"]
LAYOUTS: tuple[Layout, ...] = ("safetensors", "pt", "prefixed", "vllm", "vllm-bin")


class Made:
    """Heads as plain tensors: blocks[k][i] = (weight, bias or None), projections[k]."""

    def __init__(
        self,
        hidden: int,
        rows: int,
        heads: int = 3,
        layers: int = 1,
        *,
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        source = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=source) / shape[-1] ** 0.5).to(dtype)

        self.hidden = hidden
        self.blocks = [
            [(some(hidden, hidden), some(hidden) if bias else None) for _ in range(layers)]
            for _ in range(heads)
        ]
        self.projections = [some(rows, hidden) for _ in range(heads)]

    def logits(self, features: Tensor) -> Tensor:
        """[R, K, V] in float64 after normalized states [R, D]: the paper's formula."""
        found = []
        for blocks, projection in zip(self.blocks, self.projections, strict=True):
            x = features.double()
            for weight, bias in blocks:
                moved = x @ weight.double().T + (0 if bias is None else bias.double())
                x = x + functional.silu(moved)
            found.append(x @ projection.double().T)
        return torch.stack(found, 1)

    # ── as others write them ─────────────────────────────────────────────────────────────────────

    def first_layout(self, *, projections: bool = True) -> dict[str, Tensor]:
        """FasterDecoding's: the state of a list of sequences."""
        found = {}
        for k, blocks in enumerate(self.blocks):
            for i, (weight, bias) in enumerate(blocks):
                found[f"{k}.{i}.linear.weight"] = weight
                if bias is not None:
                    found[f"{k}.{i}.linear.bias"] = bias
            if projections:
                found[f"{k}.{len(blocks)}.weight"] = self.projections[k]
        return found

    def vllm_layout(self) -> dict[str, Tensor]:
        found = {}
        for k, blocks in enumerate(self.blocks):
            for i, (weight, bias) in enumerate(blocks):
                found[f"blocks.{k}.layers.{i}.weight"] = weight
                if bias is not None:
                    found[f"blocks.{k}.layers.{i}.bias"] = bias
            found[f"lm_heads.{k}.weight"] = self.projections[k]
        return found

    def write(self, folder: Path, layout: Layout = "safetensors", **config: Any) -> Path:
        """A folder in that layout, config.json with `config` over what belongs there."""
        heads, layers = len(self.blocks), len(self.blocks[0])
        first = {
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "base_model_name_or_path": "somebody/some-model",
            "version": "2",
        }
        vllm = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden,
            "vocab_size": len(self.projections[0]),
            "num_heads": heads,
            "num_hidden_layers": layers,
            "max_paths": 64,
            "topk": 10,
        }
        if layout == "safetensors":
            return written(folder, self.first_layout(), {**first, **config})
        if layout == "pt":
            name = "medusa_lm_head.pt"
            return written(folder, self.first_layout(), {**first, **config}, name)
        if layout == "prefixed":
            tensors = {f"medusa_heads.{n}": t for n, t in self.first_layout().items()}
            return written(folder, tensors, {**first, **config}, "model.safetensors")
        name = "pytorch_model.bin" if layout == "vllm-bin" else "model.safetensors"
        return written(folder, self.vllm_layout(), {**vllm, **config}, name)


def written(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    name: str = "medusa_lm_head.safetensors",
) -> Path:
    """A folder of these tensors; entries of config that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if name.endswith(".safetensors"):
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder

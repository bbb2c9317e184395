"""Checkpoints with Mamba 2 that lack something or have it in another shape, and short configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import make_tiny
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models import load_model
from penstock.models.registry import read_spec

AT = "model.layers.0.mamba"


def changed(folder: Path, name: str, **tensors: Tensor | None) -> Path:
    """A checkpoint of that case with these tensors instead, or without them."""
    make_tiny(name, folder)
    file = folder / "model.safetensors"
    kept = load_file(file) | tensors
    save_file({k: v for k, v in kept.items() if v is not None}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("granite-hybrid", f"{AT}.in_proj.weight"),
        ("granite-hybrid", f"{AT}.out_proj.weight"),
        ("granite-hybrid", "model.layers.2.self_attn.o_proj.weight"),
        ("granite-hybrid", "model.layers.1.shared_mlp.input_linear.weight"),
        ("granite-hybrid-moe", "model.layers.1.block_sparse_moe.router.layer.weight"),
        ("bamba", f"{AT}.D"),
        ("nemotron-h", "backbone.layers.3.mixer.out_proj.weight"),
        ("nemotron-h", "backbone.layers.1.norm.weight"),
        ("nemotron-h-moe", "backbone.layers.2.mixer.experts.3.up_proj.weight"),
        ("lfm2", "model.layers.0.conv.out_proj.weight"),
        ("falcon-h1", "model.layers.1.input_layernorm.weight"),
        ("falcon-h1", "model.layers.2.mamba.conv1d.weight"),
        ("falcon-h1", "model.layers.2.self_attn.o_proj.weight"),
        ("falcon-h1", "model.layers.0.feed_forward.down_proj.weight"),
    ],
)
def test_what_is_missing_is_named_as_the_file_names_it(
    name: str, tensor: str, tmp_path: Path
) -> None:
    """Once, though two parameters are made of it; by its layer's kind, where two rules give it."""
    folder = changed(tmp_path, name, **{tensor: None})
    with pytest.raises(WeightsError, match=rf"lacks 1 of the tensors of '\w+': {tensor}\. It was"):
        load_model(folder, max_model_len=64)


def test_what_is_no_matrix(tmp_path: Path) -> None:
    folder = changed(tmp_path, "bamba", **{f"{AT}.in_proj.weight": torch.tensor(1.0)})
    with pytest.raises(WeightsError, match=r"don't fit together: .*in_proj.weight \[\]"):
        load_model(folder, max_model_len=64)


@pytest.mark.parametrize(("name", "at"), [("bamba", "feed_forward"), ("llama", "mlp")])
def test_a_gate_and_an_up_that_fit_only_together(name: str, at: str, tmp_path: Path) -> None:
    stem = f"model.layers.0.{at}"
    folder = changed(
        tmp_path, name,
        **{f"{stem}.gate_proj.weight": torch.ones(104, 64),
           f"{stem}.up_proj.weight": torch.ones(96, 64)},
    )  # fmt: skip
    with pytest.raises(WeightsError, match=r"gate_proj.* \[104, 64\] .*up_proj.* \[96, 64\]"):
        load_model(folder, max_model_len=64)


@pytest.mark.parametrize(("name", "size"), [("granite-moe-shared", 0), ("granite-hybrid", 1024)])
def test_a_shared_block_by_default(name: str, size: int, tmp_path: Path) -> None:
    make_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["shared_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    mlp = read_spec(tmp_path).decoder.layers[0].mlp
    assert (mlp.intermediate if mlp.experts is None else mlp.experts.shared) == size

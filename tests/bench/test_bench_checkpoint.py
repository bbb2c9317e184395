"""`benchmarks/make_checkpoint.py`: real shapes, random weights, the same bytes for a seed."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.models.load import load_model
from penstock.models.registry import read_spec
from penstock.models.weights import plan_weights


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
        ("lfm2-1.2b", 1_170_340_608),
        ("granite-4.0-h-1b", 1_461_538_368),
        ("qwen3.5-0.8b", 752_393_024),
    ],
)
def test_shapes_are_transformers_own(
    make_checkpoint: ModuleType, tmp_path: Path, shape: str, parameters: int
) -> None:
    """Names, shapes and number of parameters, without allocating them."""
    config = make_checkpoint.SHAPES[shape]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ours = make_checkpoint.tensor_shapes(config)
    assert ours == theirs
    assert sum(map(math.prod, ours.values())) == parameters


def test_a_shape_with_experts(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    """As many values as transformers', whose experts lie in one tensor; all names have places."""
    config = make_checkpoint.SHAPES["qwen3-30b-a3b-4l"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    ours = make_checkpoint.tensor_shapes(config)
    count = sum(math.prod(shape) for shape in ours.values())
    assert count == sum(p.numel() for p in model.parameters())
    plans, unknown = plan_weights(ours, read_spec(tmp_path))
    assert not unknown
    assert all(None not in plan.parts for plan in plans.values())


def test_it_loads_and_is_random(tiny: Path) -> None:
    loaded = load_model(tiny)
    assert loaded.dtype is torch.bfloat16
    assert loaded.max_model_len == 2048
    (file,) = tiny.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        weight = tensors.get_tensor("model.embed_tokens.weight").float()
        norm = tensors.get_tensor("model.norm.weight")
    assert weight.mean().abs() < 1e-3
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    assert bool((norm == 1).all())


def test_a_seed_gives_the_same_bytes_in_any_shards(
    make_checkpoint: ModuleType, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests(folder: Path) -> dict[str, str]:
        found = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  it isn't a mapping
                    data = tensors.get_tensor(name).view(torch.uint8).numpy().tobytes()
                    found[name] = hashlib.sha256(data).hexdigest()
        return found

    monkeypatch.setattr(make_checkpoint, "SHARD_BYTES", 70_000)
    make_checkpoint.write_checkpoint("tiny", tmp_path / "sharded")
    make_checkpoint.write_checkpoint("tiny", tmp_path / "other", seed=1)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    load_model(tmp_path / "sharded")
    assert digests(tmp_path / "sharded") == digests(tiny)
    other = digests(tmp_path / "other")
    assert all(other[name] != d for name, d in digests(tiny).items() if "norm" not in name)

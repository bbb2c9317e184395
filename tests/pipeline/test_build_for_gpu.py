"""Engines for a GPU are built where none is, and run where one is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock import LLM
from penstock.cli.examined import examine
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.errors import ConfigError, EngineFolderError
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.pipeline.build import BuildOptions
from penstock.quant import ROWS
from penstock.runtime.beside import Target
from penstock.runtime.device import Device
from penstock.runtime.draft_model import open_draft
from penstock.runtime.engine_folder import EngineFolder, digest
from penstock.runtime.plan import fixed_tensors
from tests.models.stories import POSITIONS
from tests.pipeline.conftest import Build

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
ON_GPU = Device(torch.device("cpu"), by_triton=True)
"""What stands for one: tensors lie as there."""


def edited(folder: Path, copy: Path, part: str, **values: Any) -> Path:
    """The same but for fields of its manifest."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "engine.json").read_text())
    manifest[part].update(values)
    manifest["digest"] = digest(manifest)
    (copy / "engine.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("quantization", [None, "w4a16-g32", "w8a8"])
def test_tensors_are_those_that_loading_makes(engine_of: Build, quantization: str | None) -> None:
    folder = engine_of(quantization=quantization, device="cuda")
    engine = EngineFolder.open(folder, verify=True)
    loaded = engine.load(POSITIONS, device=ON_GPU).model
    fresh = load_model(resolve("stories"), quantization=quantization, storage=ROWS).model
    found, expected = fixed_tensors(loaded), fixed_tensors(fresh)
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    assert loaded.head.weight_format == fresh.head.weight_format
    choices = engine.manifest["choices"]
    assert (choices["device"], choices["forward"]) == ("cuda", "graphs")
    assert "--device cuda" in engine.command


@no_gpu
def test_without_a_gpu(engine_of: Build) -> None:
    folder = engine_of(device="cuda")
    for name in ("auto", "cpu"):
        with pytest.raises(ConfigError, match="was built for a GPU, and none can be used"):
            LLM(folder, device=name)
    with pytest.raises(ConfigError, match="device='cuda' can't be used"):
        LLM(folder, device="cuda")
    found = examine(str(folder))
    assert not found.runs
    assert "built for a GPU" in found.why


def test_a_cpus_engine_stays_on_the_cpu(engine_of: Build) -> None:
    with pytest.raises(ConfigError, match="was built for a CPU, so device='cuda:1' can't"):
        LLM(engine_of(), device="cuda:1")


def test_a_draft_model_of_another_kind(engine_of: Build) -> None:
    asked = {"method": "draft_model", "model": engine_of(device="cuda")}
    with pytest.raises(ConfigError, match="built for a GPU, but its target runs on a CPU"):
        LLM("stories", device="cpu", speculative_config=asked)


def test_a_draft_model_of_a_cpu(engine_of: Build) -> None:
    loaded = load_model(resolve("stories"))
    asked = {"method": "draft_model", "model": engine_of()}
    config = EngineConfig.of(model="stories", speculative_config=asked)
    target = Target(resolve("stories"), loaded, None, None, device=ON_GPU)
    with pytest.raises(ConfigError, match="built for a CPU, but its target runs on a GPU"):
        open_draft(config, target)


def test_it_moves_between_machines(engine_of: Build, tmp_path: Path) -> None:
    """Of another processor and torch: nothing in it is compiled. Of another Penstock: not."""
    folder = engine_of(device="cuda")
    moved = edited(folder, tmp_path / "moved", "fingerprint", isa="neon", arch="arm64", torch="9.9")
    assert EngineFolder.open(moved).for_gpu
    older = edited(folder, tmp_path / "older", "fingerprint", penstock="0.0.1")
    with pytest.raises(EngineFolderError, match=r"built for Penstock 0\.0\.1"):
        EngineFolder.open(older)


@pytest.mark.parametrize(("forward", "device"), [("program", "cuda"), ("graphs", "cpu")])
def test_a_manifest_that_says_two_things(
    engine_of: Build, tmp_path: Path, forward: str, device: str
) -> None:
    folder = engine_of(device=device)
    wrong = edited(folder, tmp_path / "wrong", "choices", forward=forward)
    with pytest.raises(EngineFolderError, match="forward in its manifest is"):
        EngineFolder.open(wrong)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"passes": ("dead-code",)}, "passes is for CPUs"),
        ({"passes": ()}, "passes is for CPUs"),
        ({"forward": "package"}, "forward='package' is for CPUs"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is for CPUs"),
        ({"kv_cache_dtype": "kivi"}, "kv_cache_dtype='kivi' is for CPUs"),
    ],
)
def test_what_is_of_cpus(tmp_path: Path, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BuildOptions(model="stories", output=tmp_path / "engine", device="cuda", **chosen)


def test_the_command(tmp_path: Path) -> None:
    words = ["build", "stories", "-o", str(tmp_path / "engine"), "--device", "cuda"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "by CUDA graphs, recorded when it starts" in found.output
    assert "nothing to choose: a GPU's kernels are compiled where it is" in found.output

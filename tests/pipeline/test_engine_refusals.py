"""What an engine can't run with is refused, naming both sides and the command that mends it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.config import EngineConfig
from penstock.errors import ConfigError, EngineFolderError, ModelNotFoundError
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime import load_runtime
from penstock.runtime.engine_folder import EngineFolder, digest
from tests.models.stories import POSITIONS
from tests.models.tiny import make_tiny
from tests.pipeline.conftest import Build, needs_native

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def engine(engine_of: Build, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(engine_of(), tmp_path / "engine"))


def edit(folder: Path, change: Edit) -> None:
    manifest = json.loads((folder / "engine.json").read_text())
    change(manifest)
    manifest["digest"] = digest(manifest)
    (folder / "engine.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("penstock", "0.0.7", r"built for Penstock 0\.0\.7, here is \d"),
        ("torch", "1.13", r"built for torch 1\.13, here is 2\.\d"),
        ("arch", "riscv64", "built for processors of the kind riscv64, here is"),
        ("isa", "avx1024", "built for the instruction set avx1024, here is"),
        ("plan", 99, "built for plans 99, here is \\d"),
        ("folder", 99, "built for the layout of engine folders 99, here is \\d"),
    ],
)
def test_another_place(engine: Path, field: str, value: object, words: str) -> None:
    edit(engine, lambda manifest: manifest["fingerprint"].update({field: value}))
    with pytest.raises(EngineFolderError, match=words) as caught:
        LLM(engine)
    assert "penstock build stories -o" in str(caught.value)
    assert str(caught.value).endswith("--profile 1,8,128 --force")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"deterministic": False}, "deterministic=False is for GPUs, and this model runs on the"),
        ({"compilation_config": {}}, "compilation_config is for GPUs, .* Leave it out"),
        ({"nvtx": True}, "nvtx is for GPUs"),
    ],
)
def test_what_only_a_gpu_heeds(engine: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(engine, **arguments)


def test_kernels_that_an_engine_was_not_built_for(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"PENSTOCK_KERNELS=triton can't take effect. Unset it"):
        load_runtime(EngineConfig.of(model=engine))
    with pytest.raises(ConfigError, match="Unset it to build one"):
        build(BuildOptions("stories", tmp_path / "another"))


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def flip(name: str, at: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(len(data) * at)] ^= 1
        (folder / name).write_bytes(data)

    return damage


def move_tensor(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        next(iter(manifest["weights"]["tensors"].values()))["offset"] = 1 << 40

    edit(folder, change)


def lose_tensor(folder: Path) -> None:
    edit(folder, lambda manifest: manifest["weights"]["tensors"].pop("norm.weight"))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "short weights": (cut("weights.bin", 0.6), r"weights\.bin has [\d,]+ bytes instead of [\d,]+"),
    "no weights": (lambda f: (f / "weights.bin").unlink(), r"weights\.bin has 0 bytes instead"),
    "short plan": (cut("plan.json", 0.5), r"plan\.json has"),
    "another plan": (flip("plan.json", 0.5), r"plan\.json is damaged"),
    "another config": (flip("config.json", 0.5), r"config\.json is damaged"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "short manifest": (cut("engine.json", 0.9), r"engine\.json is not valid JSON"),
    "another manifest": (
        lambda f: (f / "engine.json").write_text(
            (f / "engine.json").read_text().replace('"max_num_seqs": 8', '"max_num_seqs": 9')
        ),
        "doesn't match its digest|don't match its digest",
    ),
    "a list": (lambda f: (f / "engine.json").write_text("[]"), "holds a list"),
    "not an engine's": (lambda f: (f / "engine.json").write_text("{}"), "of another kind: None"),
    "half-written": (lambda f: (f / "engine.json").unlink(), "hasn't ended, or was interrupted"),
    "a place outside": (move_tensor, "offset in its manifest is 1099511627776"),
    "a tensor less": (lose_tensor, "where the tensor before it ends"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage(engine: Path, what: str) -> None:
    damage, words = DAMAGES[what]
    damage(engine)
    with pytest.raises(EngineFolderError, match=words) as caught:
        LLM(engine)
    # where --force would replace it, for --force spares what may be somebody's own
    ours = what not in ("short manifest", "a list", "not an engine's", "half-written")
    assert ("--force" in str(caught.value)) == ours and str(engine) in str(caught.value)
    assert ("Delete it and build it again" in str(caught.value)) != ours


def test_a_folder_that_is_being_written(engine: Path) -> None:
    partial = engine.rename(engine.with_name("engine.partial"))
    with pytest.raises(ModelNotFoundError, match="was being written when its export or build"):
        LLM(partial)
    with pytest.raises(EngineFolderError, match="its build hasn't ended, or was interrupted"):
        EngineFolder.open(partial.rename(engine.with_name("other.partial")))


def test_damaged_weights_are_found_where_asked(engine: Path) -> None:
    index = json.loads((engine / "engine.json").read_text())["weights"]["tensors"]
    entry = index["layers.1.mlp.down.weight"]
    EngineFolder.open(engine, verify=True)
    data = bytearray((engine / "weights.bin").read_bytes())
    data[entry["offset"] + entry["bytes"] // 2] ^= 16
    (engine / "weights.bin").write_bytes(data)
    EngineFolder.open(engine)
    with pytest.raises(EngineFolderError, match=r"layers\.1\.mlp\.down\.weight .* is damaged"):
        LLM(engine, verify=True)
    with pytest.raises(ConfigError, match="verify=True checks the sums of an engine or an export"):
        LLM("stories", verify=True)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("quantization", "w4a8", "quantization='w4a8', but .* was built with 'bfloat16'"),
        ("dtype", "float32", "dtype='float32', but .* was built with 'bfloat16'"),
        ("kv_cache_dtype", "int8", "kv_cache_dtype='int8', but .* was built with 'auto'"),
        ("kv_cache_dtype", "float32", "this model runs in bfloat16"),
        (
            "max_model_len",
            POSITIONS + 1,
            f"max_model_len={POSITIONS + 1}, but .* was built for up to {POSITIONS}",
        ),
        ("max_num_seqs", 9, "max_num_seqs=9, but .* was built for up to 8"),
        ("max_num_batched_tokens", 129, "max_num_batched_tokens=129, but .* up to 128"),
        ("revision", "main", "revision='main' is of the hub"),
    ],
)
def test_a_contradiction(engine_of: Build, option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(engine_of(), **{option: value})


def test_what_agrees_with_the_engine(engine_of: Build) -> None:
    folder = engine_of(quantization="w4a8", kv_cache_dtype="fp8")
    llm = LLM(
        folder, quantization="w4a8-g32", kv_cache_dtype="fp8_e4m3", dtype="bfloat16",
        max_model_len=100, max_num_seqs=3, max_num_batched_tokens=50,
    )  # fmt: skip
    assert llm.config.scheduler.max_num_seqs == 3
    assert llm.config.scheduler.max_num_batched_tokens == 50
    assert llm.engine.max_model_len == 100 and str(llm.runtime.layout.dtype).endswith("e4m3fn")
    assert LLM(engine_of(), kv_cache_dtype="bfloat16").runtime.layout.dtype is torch.bfloat16


def test_two_caches_of_four_bits_are_told_apart(engine_of: Build) -> None:
    for built, asked in (("int4", "kivi"), ("kivi", "int4")):
        words = f"kv_cache_dtype='{asked}', but .* was built with '{built}'"
        with pytest.raises(ConfigError, match=words):
            LLM(engine_of(kv_cache_dtype=built), kv_cache_dtype=asked)


@needs_native
def test_what_is_left_open_is_the_engines(engine_of: Build) -> None:
    llm = LLM(engine_of())
    assert llm.runtime.engine is not None
    chosen = llm.runtime.engine.tuned
    assert llm.config.scheduler.max_num_seqs == 8
    assert llm.config.scheduler.max_num_batched_tokens == chosen.prefill_tokens
    assert llm.engine.max_model_len == POSITIONS


def test_a_shorter_context_with_other_rope_factors(engine_of: Build, tmp_path: Path) -> None:
    """longrope: below 32 tokens the factors are others, and the engine has the long ones."""
    model = make_tiny("phi3-long", tmp_path / "model").folder
    engine = engine_of(model, dtype="float32", max_model_len=128)
    load_runtime(EngineConfig.of(model=engine, max_model_len=64, skip_tokenizer_init=True))
    with pytest.raises(ConfigError, match="max_model_len=20 takes this model's short rope"):
        load_runtime(EngineConfig.of(model=engine, max_model_len=20, skip_tokenizer_init=True))

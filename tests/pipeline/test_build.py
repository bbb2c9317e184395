"""An engine folder is there whole or not at all, and says what was done."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.errors import ConfigError, EngineFolderError, WeightsError
from penstock.models.hub import resolve
from penstock.pipeline import build as building
from penstock.pipeline import tuning
from penstock.pipeline.build import BuildOptions, build, parse_profile
from penstock.pipeline.new_folder import new_folder
from penstock.pipeline.tuning import Timing, Timings, choose, make_step, step_sizes, thread_counts
from penstock.pipeline.weights_file import WeightsFile
from penstock.runtime.engine_folder import EngineFolder, Limits, is_engine
from tests.models.stories import LAYERS, shallow
from tests.pipeline.conftest import Build, needs_native

KILLED = Path(__file__).with_name("killed_build.py")


def options(output: Path, **changes: Any) -> BuildOptions:
    changes = {"model": "stories", "profile": (1, 8, 64), "max_num_seqs": 8, **changes}
    return BuildOptions(output=output, **changes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is built faster."""
    return shallow(tmp_path_factory.mktemp("small") / "model")


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def test_the_folder(engine_of: Build) -> None:
    folder = engine_of(quantization="w4a8")
    manifest = json.loads((folder / "engine.json").read_text())
    tensors = manifest["weights"]["tensors"]
    end = 0
    for entry in tensors.values():  # in order, aligned, apart
        assert entry["offset"] % 4096 == 0 and entry["offset"] >= end
        end = entry["offset"] + entry["bytes"]
    assert manifest["weights"]["bytes"] == (folder / "weights.bin").stat().st_size >= end
    assert "head.weight" in tensors and "embed.weight" not in tensors  # tied, so stored once
    assert sum(name.endswith("cos_sin") for name in tensors) == 1  # of all layers
    assert tensors["layers.0.attention.qkv.scale"]["dtype"] == "float16"
    assert manifest["choices"]["quantization"] == "w4a8"
    assert (folder / "engine.json").stat().st_mtime_ns == max(
        path.stat().st_mtime_ns for path in folder.iterdir()
    )


@needs_native
def test_the_report(engine_of: Build) -> None:
    folder = engine_of()
    report = json.loads((folder / "report.json").read_text())
    assert report["operator_counts"]["rotary_cache"] == LAYERS
    assert report["operators"][1]["weights"][0] == "layers.0.attention.qkv.weight"
    assert report["bytes"]["weights_file"] == (folder / "weights.bin").stat().st_size
    assert report["bytes"]["workspace"] > 0 and set(report["seconds"]) == {"pack", "plan", "time"}
    assert report["compiled"]["program"] >= 2
    measured = json.loads((folder / "timings.json").read_text())["measured"]
    assert {entry["tokens"] for entry in measured} == set(step_sizes((1, 8, 128)))


def test_little_memory_is_needed(tmp_path: Path) -> None:
    """Tensors are written as they are packed: of the model only shapes are left."""
    seen: list[int] = []
    real = WeightsFile.take

    def take(self: WeightsFile, name: str, module: Any) -> None:
        real(self, name, module)
        held = [p for p in module._parameters.values() if p is not None]
        seen.append(sum(0 if p.is_meta else p.nbytes for p in held))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightsFile, "take", take)
        build(options(tmp_path / "engine"))
    assert len(seen) > 20 and set(seen) == {0}


# ── whole or not at all ──────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
def test_killed_at_random_moments(tmp_path: Path) -> None:
    rounds, model = 10, shallow(tmp_path / "model", 1)
    command = [sys.executable, str(KILLED), str(model), str(tmp_path), str(2 * rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert len(found) == 2 * rounds
    assert set(found[:rounds]) <= {"none", "new"} and set(found[rounds:]) <= {"old", "new"}


@needs_native
def test_what_was_there_stays_where_a_build_fails(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "engine"
    build(options(output, model=small))
    before = (output / "engine.json").read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "make_step", fail)
    with pytest.raises(KeyboardInterrupt):
        build(options(output, model=small, force=True, timing_cache=False))
    assert (output / "engine.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "WeightsFile", lambda _: WeightsFile(Path("/dev/full")))
    with pytest.raises(EngineFolderError, match=r"The disk filled up while .*MB are free now"):
        build(options(tmp_path / "engine"))
    assert list(tmp_path.iterdir()) == []


def test_two_builds_into_one_folder(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with open(tmp_path / ".engine.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"Another process is writing .*engine now"):
            build(options(output, model=small))
    build(options(output, model=small))
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_an_engine_is_replaced_with_force_only(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    build(options(output, model=small))
    with pytest.raises(ConfigError, match=r"engine exists\. Give --force to replace it"):
        build(options(output, model=small))
    running = LLM(output)
    build(options(output, model=small, max_num_seqs=3, force=True))
    assert EngineFolder.open(output).limits.max_num_seqs == 3
    assert running.generate("Once")[0].outputs[0].token_ids  # over the pages of the old one


def test_other_folders_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"holds files that Penstock didn't write|is a file"):
        build(options(tmp_path / "letters", force=True))
    assert (tmp_path / "letters" / "mother.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["weights.bin", "engine.json", "plan.json"])
def test_folders_with_a_file_of_an_engines_name(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / name).write_text('{"kind": "another engine"}')
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds files that Penstock didn't write"):
        build(options(mine, force=True))
    assert (mine / "thesis.txt").read_text() == "precious"


def test_what_somebody_put_into_an_engine_stays(engine_of: Build, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engine_of(), tmp_path / "engine"))
    (engine / "notes").mkdir()
    for name in ("b.txt", "a.txt"):
        (engine / "notes" / name).write_text("precious")
    with pytest.raises(ConfigError, match=r"engine holds notes/a\.txt and 1 more, which wasn't"):
        build(options(engine, force=True))
    assert (engine / "notes" / "b.txt").read_text() == "precious"
    shutil.rmtree(engine / "notes")
    (engine / "plan.json").unlink()  # damaged, so that it can't run, but nobody else's
    build(options(engine, force=True))
    assert EngineFolder.open(engine).limits.profile == (1, 8, 64)


def test_a_model_with_a_file_of_an_engines_name(tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve("stories"), tmp_path / "model"))
    (model / "weights.bin").write_text("of something else")
    assert not is_engine(model)
    build(options(tmp_path / "engine", model=model))
    assert LLM(model).generate("Once")[0].outputs[0].token_ids


def test_what_a_dead_build_has_left(small: Path, tmp_path: Path) -> None:
    left = tmp_path / "engine.partial"
    left.mkdir()
    (left / "weights.bin").write_bytes(b"1")
    assert is_engine(left)
    build(options(tmp_path / "engine", model=small))
    assert not left.exists()


def test_without_swapping_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.new_folder._exchange", lambda *_: False)
    own = frozenset({"x"})
    for text in ("old", "new"):
        with new_folder(tmp_path / "a", force=True, own_files=lambda _: own) as partial:
            (partial / "x").write_text(text)
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# ── what can't be ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "device='tpu' isn't one of cpu, cuda"),
        ({"quantization": "w5a5"}, "quantization='w5a5' isn't one of"),
        ({"profile": (8, 1, 64)}, "profile=8,1,64 must be the fewest, usual and most"),
        ({"profile": (1, 1, 4)}, "up to 4 tokens, fewer than max_num_seqs=8"),
        ({"max_model_len": 10**6}, "max_model_len=1000000 is more than the"),
        ({"quantization": "w8a8-static"}, "needs a scale of each matrix's activations"),
    ],
)
def test_choices_that_cant_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(options(tmp_path / "engine", **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "nf4", "fp8"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, quantization: str) -> None:
    shutil.copytree(resolve("stories"), tmp_path / "model")
    name, file = "model.layers.2.self_attn.q_proj.weight", tmp_path / "model/model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    chosen = {"model": tmp_path / "model", "quantization": quantization}
    with pytest.raises(WeightsError, match=r"layers\.2\.self_attn\.q_proj\.weight.*NaN or infinit"):
        build(options(tmp_path / "engine", **chosen))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_engine_is_no_model(engine_of: Build, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is an engine already"):
        build(options(tmp_path / "engine", model=engine_of()))
    with pytest.raises(ConfigError, match="There is no folder"):
        build(options(tmp_path / "not" / "there"))


@pytest.mark.parametrize("text", ["", "1,2", "1,b,3", "1,2,3,4", "-1,2,3", "1,2," + "9" * 5000])
def test_a_profile_is_three_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="must be three numbers of tokens"):
        parse_profile(text)
    assert parse_profile("1, 8,64") == (1, 8, 64)


# ── timings ──────────────────────────────────────────────────────────────────────────────────────


@needs_native
def test_a_second_build_replays(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    first = build(options(tmp_path / "a", model=small))
    again = build(options(tmp_path / "b", model=small))
    anew = build(options(tmp_path / "c", model=small, timing_cache=False))
    other = build(options(tmp_path / "d", model=small, max_num_seqs=4))
    sources = [report["timings"] for report in (first, again, anew, other)]
    assert sources == ["measured", "replayed", "measured", "measured"]
    assert again["chosen"] == first["chosen"]
    a, b = (json.loads((tmp_path / x / "timings.json").read_text()) for x in "ab")
    assert a["measured"] == b["measured"]


@needs_native
def test_a_broken_cache_is_measured_anew(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    build(options(tmp_path / "a", model=small))
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("{")
    assert build(options(tmp_path / "b", model=small))["timings"] == "measured"


def test_what_is_chosen() -> None:
    """Fewer threads only where clearly faster; the smallest step that is nearly the fastest."""
    times = {
        (1, 1): 1.0, (1, 2): 1.05, (1, 4): 2.0,  # 1 and 2 are as fast: far from 4
        (8, 1): 4.0, (8, 2): 2.0, (8, 4): 1.95,
        (16, 2): 4.0, (16, 4): 3.0,
        (32, 4): 5.5,
        (64, 4): 10.5,
    }  # fmt: skip
    timings = Timings(tuple(Timing(t, n, s) for (t, n), s in times.items()), 0.0)
    chosen = choose(timings, (1, 16, 64))
    assert chosen.threads == ((1, 1), (8, 4), (16, 4), (32, 4), (64, 4))
    assert chosen.prefill_tokens == 32  # 5.8 tokens a second, where the best has 6.1
    disturbed = Timings(timings.steps, 0.5)
    assert choose(disturbed, (1, 16, 64)).threads == ()


def test_sizes_and_threads() -> None:
    assert step_sizes((1, 12, 64)) == [1, 2, 4, 8, 12, 16, 32, 64]
    assert step_sizes((8, 8, 8)) == [8]
    assert thread_counts(6) == [1, 2, 4, 6] and thread_counts(1) == [1]


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 100, 256])
def test_the_steps_that_are_timed(tokens: int) -> None:
    """Every token has a place of its own, in the blocks of its sequence."""
    limits = Limits(8, 100, (1, 8, 256))
    step = make_step(tokens, limits, 32)
    assert step.num_tokens == tokens and int(step.query_start[-1]) == tokens
    assert len(set(step.slots.tolist())) == tokens
    assert int(step.slots.max()) < 32 * tuning.blocks_needed(limits, 32)
    for b in range(step.num_sequences):
        last = int(step.query_start[b + 1]) - 1
        assert int(step.context_len[b]) == int(step.positions[last]) + 1 <= 100
        position = int(step.positions[last])
        block = int(step.block_table[b, position // 32])
        assert int(step.slots[last]) == block * 32 + position % 32


@needs_native
def test_the_choice_is_heeded(engine_of: Build, tmp_path: Path) -> None:
    """A program runs on as many threads as were chosen, and steps have as many tokens."""
    llm = LLM(engine_of())
    engine = llm.runtime.engine
    assert engine is not None and engine.tuned.prefill_tokens is not None
    seen: list[int] = []
    forward = llm.runtime.runner.forward

    def watch(step: Any) -> torch.Tensor:
        seen.append(step.num_tokens)
        return forward(step)

    llm.runtime.runner.forward = watch  # type: ignore[method-assign]
    llm.generate([[5] * 300])
    assert max(seen) == engine.tuned.prefill_tokens

"""A manifest that no build has written is refused by its field, or changes nothing."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.doctor import examine
from penstock.config import EngineConfig
from penstock.errors import ConfigError, EngineFolderError
from penstock.models.exported import sha256
from penstock.runtime import HiddenRunner, load_runtime
from penstock.runtime import manifest as checks
from penstock.runtime.engine_folder import EngineFolder, digest, read_manifest
from tests.pipeline.conftest import Build, needs_native
from tests.pipeline.test_engine_exact import logits

Manifest = dict[str, Any]
STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 7, -4096, 4096, 2**31, 2**40, 2**63, 10**30, 0.5, 64.0, -0.0,
    float("nan"), float("inf"), "", "x", "../../etc/passwd", "'", "\0", "float64", "uint8", [], [0],
    [-1, 2], [1e9], [[]], {}, {"x": 1}, {"a": {"b": []}},
]  # fmt: skip


@pytest.fixture
def engine(engine_of: Build, tmp_path: Path) -> Path:
    """A copy to change, of 4 bits: packed tensors of several kinds."""
    return Path(shutil.copytree(engine_of(quantization="w4a8"), tmp_path / "engine"))


def write(folder: Path, manifest: Manifest) -> None:
    """With the digest that belongs to it: it is no guard here."""
    whole = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps({**whole, "digest": digest(json.loads(json.dumps(whole)))})
    (folder / "engine.json").write_text(text)


def read(folder: Path) -> Manifest:
    found: Manifest = json.loads((folder / "engine.json").read_text())
    return found


def outcome(folder: Path) -> list[torch.Tensor]:
    """Logits and hidden states of a fresh load, in both ways to run."""
    found = []
    for eager in (False, True):
        runtime = load_runtime(
            EngineConfig.of(
                model=folder, skip_tokenizer_init=True, num_gpu_blocks_override=40,
                max_model_len=128, enforce_eager=eager,
            )
        )  # fmt: skip
        found += logits(runtime)
    return found


# ── any change ───────────────────────────────────────────────────────────────────────────────────


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a manifest; of its many tensors and files a few."""
    found = [at] if at else []
    items: list[tuple[Any, Any]] = []
    if isinstance(data, dict):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    if at in (("weights", "tensors"), ("files",)):
        items = items[:2] + items[-2:]
    return found + [place for key, value in items for place in places(value, (*at, key))]


def mutate(manifest: Manifest, seed: int) -> tuple[Manifest, str]:
    """One change that `seed` decides, and what it is."""
    choose, changed = random.Random(seed), copy.deepcopy(manifest)
    candidates = [place for place in places(changed) if place[0] not in ("digest", "kind")]
    *path, last = choose.choice(candidates)
    holder: Any = changed
    for key in path:
        holder = holder[key]
    kind = choose.choice(["replace", "replace", "replace", "replace", "remove", "add", "nudge"])
    if kind == "remove" and isinstance(holder, dict):
        del holder[last]
    elif kind == "add" and isinstance(holder, dict):
        holder[choose.choice(["x", "layers.9.mlp.up.weight", "../x"])] = choose.choice(STRANGE)
    elif kind == "nudge" and type(holder[last]) is int:
        holder[last] += choose.choice([-4096, -1, 1, 2, 4096, 1 << 20])
    else:
        holder[last] = choose.choice(STRANGE)
    return changed, f"{kind} at {'.'.join(map(str, (*path, last)))}"


def test_two_hundred_changes(engine: Path) -> None:
    """Each is an EngineFolderError or a ConfigError, or the engine computes what it did before."""
    manifest, want = read(engine), outcome(engine)
    refused = same = 0
    for seed in range(200):
        changed, what = mutate(manifest, seed)
        write(engine, changed)
        try:
            got = outcome(engine)
        except (EngineFolderError, ConfigError) as error:
            refused += 1
            named = str(engine) in str(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {what}: {error!r}") from error
        else:
            same += 1
            named = True
            assert all(map(torch.equal, got, want)), f"seed {seed}, {what}"
        assert named, what
        examine(engine)  # `penstock doctor` reads whatever there is
    assert refused > 100 and same > 10


def test_every_field_is_needed_or_changes_nothing(engine: Path) -> None:
    manifest, want = read(engine), outcome(engine)
    ignored = []
    for *path, last in places(manifest):
        changed = copy.deepcopy(manifest)
        holder: Any = changed
        for key in path:
            holder = holder[key]
        del holder[last]
        write(engine, changed)
        try:
            assert all(map(torch.equal, outcome(engine), want)), last
        except (EngineFolderError, ConfigError):
            continue
        ignored.append(".".join(map(str, (*path, last))))
    needed = {"weights.file", "digest"} | {name for name in ignored if name.startswith("files.")}
    assert set(ignored) - needed <= {f"fingerprint.machine.{x}" for x in ("cores", "flags")} | {
        f"fingerprint.machine.flags.{i}" for i in range(100)
    }


# ── named fields ─────────────────────────────────────────────────────────────────────────────────


def put(*path: Any, value: Any) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        holder: Any = manifest
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value

    return change


def first(manifest: Manifest) -> Manifest:
    found: Manifest = next(iter(manifest["weights"]["tensors"].values()))
    return found


def swap(manifest: Manifest) -> None:
    """Two tensors on one place."""
    one, two, *_ = manifest["weights"]["tensors"].values()
    two["offset"] = one["offset"]


def rename(manifest: Manifest) -> None:
    tensors = manifest["weights"]["tensors"]
    manifest["weights"]["tensors"] = {
        name.replace("layers.1.mlp.down.scale", "layers.1.mlp.down.scales"): entry
        for name, entry in tensors.items()
    }


CHANGES: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "negative shape": (lambda m: first(m).update(shape=[-16, 64]), r"shape\.0 .* is -16, not a"),
    "huge shape": (lambda m: first(m).update(shape=[2**40, 2]), r"shape\.0 .* is 1099511627776, n"),
    "another shape": (lambda m: first(m)["shape"].append(2), r"bytes .*, not the [\d,]+ of \["),
    "a float shape": (lambda m: first(m).update(shape=[64.0]), r"shape\.0 .* is 64\.0, not"),
    "no shape": (lambda m: first(m).pop("shape"), r"lacks weights\.tensors\.[\w.]+\.shape"),
    "no dtype": (lambda m: first(m).update(dtype="nn"), r"dtype .* is 'nn', not an element type"),
    "a float offset": (lambda m: first(m).update(offset=0.0), r"offset .* is 0\.0, not a whole"),
    "one over another": (swap, r"offset .* is 0, not \d+, where the tensor before"),
    "a truth for a size": (put("weights", "bytes", value=True), r"weights\.bytes .* is True, not"),
    "a list of tensors": (put("weights", "tensors", value=[]), r"weights\.tensors .* is \[\], not"),
    "no sum": (lambda m: first(m).update(sha256="0" * 63), r"sha256 .*, not a SHA-256"),
    "another name": (rename, r"tensors that|no place for"),
    "a place outside": (put("files", "../x", value={"bytes": 1, "sha256": "0" * 64}), r"'\.\./x'"),
    "no plan listed": (lambda m: m["files"].pop("plan.json"), r"lacks files\.plan\.json"),
    "no choices": (lambda m: m.pop("choices"), "its manifest lacks choices"),
    "many sequences": (put("choices", "max_num_seqs", value=2**31), r"max_num_seqs .* is 21474"),
    "more than a step": (put("choices", "max_num_seqs", value=129), r"at most the profile's 128"),
    "a long context": (put("choices", "max_model_len", value=1025), r"has 1,024 positions, fewer"),
    "a profile of two": (put("choices", "profile", value=[1, 8]), r"choices\.profile .* \[1, 8\]"),
    "a falling profile": (put("choices", "profile", value=[8, 1, 128]), r"choices\.profile"),
    "no cache": (put("choices", "kv_cache_dtype", value="int3"), r"kv_cache_dtype .* 'int3'"),
    "another device": (put("choices", "device", value="tpu"), r"choices\.device .* 'tpu'"),
    "another dtype": (put("dtype", value="float32"), "dtype .* is float32, but formats are w4a8"),
    "other formats": (put("formats", "matrix", value="bfloat16"), "weight_formats .* is 'w4a8-g3"),
    "a broken command": (put("command", value="penstock 'build"), "command .*, not a command"),
    "no workspace": (put("workspace_bytes", value=-1), "workspace_bytes .* is -1, not"),
    "no machine": (put("fingerprint", "machine", value=4), "fingerprint.machine .* is 4, not"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_field_that_is_wrong_is_named(engine: Path, what: str) -> None:
    change, words = CHANGES[what]
    manifest = read(engine)
    change(manifest)
    write(engine, manifest)
    for ways in ({}, {"enforce_eager": True}):
        with pytest.raises(EngineFolderError, match=words) as caught:
            load_runtime(EngineConfig.of(model=engine, skip_tokenizer_init=True, **ways))
        assert "Build it again: penstock build" in str(caught.value)


def test_a_plan_of_hidden_states_over_weights_that_arent_there(engine: Path) -> None:
    plan = json.loads((engine / "plan.json").read_text())
    change_plan(engine, {**plan, "hidden": json.loads(
        json.dumps(plan["hidden"]).replace("layers.0.mlp.up.scale", "layers.0.mlp.up.other")
    )})  # fmt: skip
    with pytest.raises(EngineFolderError, match=r"reads 1 tensors .* layers\.0\.mlp\.up\.other"):
        load_runtime(EngineConfig.of(model=engine, skip_tokenizer_init=True))


@needs_native
@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (None, "holds no plans"),
        (
            {"operators": []},
            "2 tensors|1 tensors|tensors that its plan doesn't read|no plan of hid",
        ),
        ({"operators": [{"op": "rms_norm", "arguments": {}}]}, "plan"),
    ],
)
def test_a_plan_of_hidden_states_that_is_none(engine: Path, hidden: Any, words: str) -> None:
    plan = json.loads((engine / "plan.json").read_text())
    change_plan(engine, {**plan, "hidden": hidden})
    with pytest.raises(EngineFolderError, match=words):  # noqa: PT012 (as it is first wanted)
        runtime = load_runtime(EngineConfig.of(model=engine, skip_tokenizer_init=True))
        HiddenRunner(runtime.model.model, runtime.runner)


def change_plan(folder: Path, plan: Any) -> None:
    (folder / "plan.json").write_text(json.dumps(plan))
    manifest, file = read(folder), folder / "plan.json"
    manifest["files"]["plan.json"] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    write(folder, manifest)


def test_a_huge_manifest_is_not_read(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_BYTES", 1000)
    with pytest.raises(EngineFolderError, match=r"engine\.json has [\d,]+ bytes, more than"):
        EngineFolder.open(engine)


def test_a_deep_one_neither(engine: Path) -> None:
    (engine / "engine.json").write_text("[" * 100_000)
    with pytest.raises(EngineFolderError, match=r"engine\.json is not valid JSON"):
        read_manifest(engine)


def test_what_a_build_writes_passes(engine: Path) -> None:
    manifest = read(engine)
    assert read_manifest(engine) == manifest
    write(engine, {**manifest, "more": {"of": "somebody else's"}})
    assert read_manifest(engine)["choices"] == manifest["choices"]

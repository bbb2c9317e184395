"""Engines whose steps run by a compiled package."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, EngineFolderError
from penstock.hardware import cache_folder
from penstock.pipeline import compiled
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime import compile_counter
from penstock.runtime.engine_folder import EngineFolder, digest
from penstock.runtime.package import PackageForward, read_package
from tests.models.stories import shallow
from tests.pipeline.conftest import Build
from tests.pipeline.test_engine_exact import assert_same, load, logits

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no compiler"
)
CHOSEN = {"quantization": "w4a8", "kv_cache_dtype": "int8", "forward": "package"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers: the compiler takes as long for one as for another."""
    return shallow(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def engine(engine_of: Build, small: Path) -> Path:
    return engine_of(small, **CHOSEN)


def test_the_same_bits(engine: Path, small: Path) -> None:
    assert_same(engine, small, quantization="w4a8", kv_cache_dtype="int8")
    runtime = load(engine)
    assert runtime.runner.how == "a compiled package"
    assert runtime.engine is not None and runtime.engine.manifest["workspace_bytes"] == 0
    assert runtime.engine.tuned.threads == ()


@pytest.mark.parametrize("cache", ["int8", pytest.param("kivi", marks=pytest.mark.slow)])
def test_tokens(engine_of: Build, small: Path, cache: str) -> None:
    chosen = CHOSEN | {"kv_cache_dtype": cache}
    engine = engine_of(small, **chosen)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    before = compile_counter.total()
    built = LLM(engine)
    (a,) = built.generate(["Once upon a time"], params)
    assert compile_counter.total() == before
    model = LLM(small, quantization="w4a8", kv_cache_dtype=cache)
    (b,) = model.generate(["Once upon a time"], params)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_a_shorter_context(engine: Path) -> None:
    """The rotary tables are inputs of fixed size: a package gets them whole."""
    short, long = load(engine, max_model_len=100), load(engine, max_model_len=128)
    for a, b in zip(logits(short), logits(long), strict=True):
        assert a.equal(b)


def test_another_block_size(engine: Path) -> None:
    with pytest.raises(ConfigError, match="exported for a cache of"):
        load(engine, block_size=64)


def test_the_second_build_compiles_nothing(engine: Path, small: Path, tmp_path: Path) -> None:
    before = compile_counter.counts().get("aot_inductor", 0)
    options = BuildOptions(
        model=small, output=tmp_path / "engine", profile=(1, 8, 128), max_num_seqs=8, **CHOSEN
    )  # type: ignore[arg-type]
    report = build(options)
    assert compile_counter.counts().get("aot_inductor", 0) == before
    assert report["seconds"]["compile"] < 5
    for name in ("package.pt2", "package.json"):
        assert (tmp_path / "engine" / name).read_bytes() == (engine / name).read_bytes()


@pytest.mark.slow  # the compiler's time
def test_a_damaged_package_in_the_cache_is_compiled_anew(
    engine: Path, small: Path, tmp_path: Path
) -> None:
    found = list((cache_folder() / "packages").glob("*.pt2"))
    before = {file: file.read_bytes() for file in found}
    for file in found:
        file.write_bytes(b"cut off")
    options = BuildOptions(
        model=small, output=tmp_path / "engine", profile=(1, 8, 128), max_num_seqs=8, **CHOSEN
    )  # type: ignore[arg-type]
    build(options)
    for a, b in zip(logits(load(tmp_path / "engine")), logits(load(engine)), strict=True):
        assert a.equal(b)
    for file, data in before.items():
        if file.read_bytes() == b"cut off":  # of another test's graph
            file.write_bytes(data)


@pytest.mark.parametrize("what", ["damaged", "torch", "missing"])
def test_a_package_that_isnt_right(engine: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(engine, folder)
    file, described = folder / "package.pt2", folder / "package.json"
    if what == "missing":
        file.unlink()
    elif what == "damaged":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        text = json.dumps(json.loads(described.read_text()) | {"torch": "1.0"})
        described.write_text(text)
        manifest = json.loads((folder / "engine.json").read_text())
        manifest["files"]["package.json"]["bytes"] = len(text)
        manifest["digest"] = digest(manifest)
        (folder / "engine.json").write_text(json.dumps(manifest))
    words = {"damaged": "is damaged", "torch": "another torch: 1.0", "missing": "is missing"}[what]
    with pytest.raises(EngineFolderError, match=f"{words}.*Build it again: penstock build"):
        load(folder)


def test_what_a_build_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"forward='eager' isn't one of program, package"):
        BuildOptions(model="stories", output=tmp_path / "engine", forward="eager")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        build(BuildOptions(model="stories", output=tmp_path / "engine", forward="package"))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cant_be_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without a home: the package is made where the engine is."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiled, "_compile", lambda graph, file: file.write_bytes(b"compiled"))
    output = tmp_path / "engine"
    build(BuildOptions(small, output, profile=(1, 1, 1), max_num_seqs=1, forward="package"))
    assert "file/cache/packages: [Errno 20] Not a directory" in caplog.text
    assert "Set PENSTOCK_CACHE." in caplog.text
    assert (output / "package.pt2").read_bytes() == b"compiled"
    assert read_package(output / "package.pt2")["graph"] and not (output / "compiling").exists()
    assert "compiling" not in (output / "engine.json").read_text()


def test_it_is_the_engine_s_own(engine: Path) -> None:
    assert EngineFolder.open(engine).forward == "package"
    assert isinstance(load(engine).runner._forward, PackageForward)

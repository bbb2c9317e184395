"""A compiled package: the same bits, nothing compiled twice, nothing wrong let in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError, KernelError, WeightsError
from penstock.nn import Decoder
from penstock.pipeline import Graph, export_graph, optimize
from penstock.pipeline.compiled import compile_graph
from penstock.pipeline.graph import weights_of
from penstock.runtime.package import PackageForward
from tests.exactness.bits import Machine, build
from tests.pipeline.test_graph import machine, steps
from tests.runtime.test_program import ints, prefill

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no compiler"),
    pytest.mark.slow,  # the compiler's time
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build(quantization="w4a8")


@pytest.fixture(scope="module")
def graph(decoder: Decoder) -> Graph:
    return optimize(export_graph(decoder, Machine(decoder).kv)).graph


@pytest.fixture(scope="module")
def package(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_graph(graph, tmp_path_factory.mktemp("packages"))


@pytest.fixture
def copied(package: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for suffix in (".pt2", ".json"):
        shutil.copy(package.with_suffix(suffix), tmp_path / f"copy{suffix}")
    return tmp_path / "copy.pt2"


def test_the_same_bits(decoder: Decoder, package: Path) -> None:
    forward = PackageForward(package, weights_of(decoder))
    assert torch.equal(steps(machine(decoder, forward)), steps(machine(decoder)))


def test_weights_stay_outside(decoder: Decoder, package: Path) -> None:
    """Another model of the same shape runs by the same package."""
    other = build(quantization="w4a8")
    with torch.no_grad():
        other.norm.parameter("weight").mul_(0.5)
    want = steps(machine(other))
    assert not torch.equal(want, steps(machine(decoder)))
    forward = PackageForward(package, weights_of(other))
    assert torch.equal(steps(machine(other, forward)), want)


def test_a_second_compilation_is_found(
    graph: Graph, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", refuse)
    assert compile_graph(graph, package.parent) == package
    assert sorted(p.name for p in package.parent.iterdir()) == sorted(
        [package.name, package.with_suffix(".json").name]
    )


RUN = """
import sys
from pathlib import Path
import torch
from penstock.pipeline.graph import weights_of
from penstock.runtime.package import PackageForward
from tests.exactness.bits import Machine, build
from tests.pipeline.test_graph import machine, steps
decoder = build(quantization="w4a8")
forward = PackageForward(Path(sys.argv[1]), weights_of(decoder))
torch.save(steps(machine(decoder, forward)), sys.argv[2])
"""


def test_running_needs_no_compiler(decoder: Decoder, package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(package), str(tmp_path / "logits.pt")]
    alone = {**os.environ, "PATH": str(tmp_path), "CXX": "none"}
    subprocess.run(command, env=alone, check=True, timeout=300, cwd=Path(__file__).parents[2])
    assert torch.equal(torch.load(tmp_path / "logits.pt"), steps(machine(decoder)))


def test_no_compiler(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"there is no 'no-such-compiler'\. Install g\+\+"):
        compile_graph(graph, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("byte", "is damaged: its SHA-256"),
        ("cut", "is damaged: its SHA-256"),
        ("no manifest", "can't be used: FileNotFoundError"),
        ("torch", "was compiled for another torch: 1.0, not"),
        ("vectors", "was compiled for another vectors: 1.0, not"),
        ("inputs", "can't be read: TypeError"),
    ],
)
def test_a_package_that_isnt_right(decoder: Decoder, copied: Path, damage: str, words: str) -> None:
    manifest = copied.with_suffix(".json")
    data = bytearray(copied.read_bytes())
    match damage:
        case "byte":
            data[len(data) // 2] ^= 1
            copied.write_bytes(data)
        case "cut":
            copied.write_bytes(data[:-100])
        case "no manifest":
            manifest.unlink()
        case _:
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {damage: "1.0"}))
    with pytest.raises(ConfigError, match=words):
        PackageForward(copied, weights_of(decoder))


def test_wrong_inputs_never_reach_it(decoder: Decoder, package: Path) -> None:
    with pytest.raises(WeightsError, match=r"qkv\.weight as uint8 .*, not as int8"):
        PackageForward(package, weights_of(build(quantization="w8a8")))
    missing = weights_of(decoder)
    del missing["norm.weight"]
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        PackageForward(package, missing)
    forward, kv, step = PackageForward(package, weights_of(decoder)), None, prefill(4)
    kv = Machine(decoder).kv
    with pytest.raises(KernelError, match=r"don't fit together: \[4\], \[2\]"):
        forward(replace(step, positions=ints(0, 1)), kv)
    with pytest.raises(KernelError, match="arrays are int32, not"):
        forward(replace(step, tokens=step.tokens.long()), kv)
    with pytest.raises(ConfigError, match="exported for a cache of"):
        forward(step, kv[:-1])
    wide = torch.zeros((1, 9), dtype=torch.int32)  # an engine's table is a view
    got = forward(replace(step, block_table=wide[:, :1]), kv)
    assert torch.equal(got, forward(step, kv))
    with pytest.raises(RuntimeError, match="outside the table"):  # by the operator itself
        forward(replace(step, tokens=step.tokens + 1000), kv)

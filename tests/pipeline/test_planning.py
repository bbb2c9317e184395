"""Plans of engines: from an export's graph or one made now, by chosen passes, all of equal bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.bench.reader import open_reader
from penstock.bench.variant import Variant
from penstock.bench.workload import longest
from penstock.errors import ConfigError, ModelError
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice
from penstock.runtime import compile_counter
from tests.models.stories import POSITIONS, VOCAB, shallow

from .conftest import Build, needs_native


def answer(model: Path, prompt: str = "Once upon a time") -> list[int]:
    llm = LLM(model, num_gpu_blocks_override=24, max_model_len=256)
    (found,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))
    return found.outputs[0].token_ids


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the embedded model: passes and formats are the same in each."""
    return shallow(tmp_path_factory.mktemp("small") / "model")


def test_the_report_says_what_passes_did(engine_of: Build) -> None:
    graph = json.loads((engine_of() / "report.json").read_text())["graph"]
    assert graph["source"] == "exported now"
    assert graph["passes"]["fuse-norm-linear"] > 0 and graph["passes"]["fuse-residual"] > 0
    assert sum(graph["after"].values()) < sum(graph["before"].values())
    assert "gate" in graph["before"] and "gate" not in graph["after"]


@needs_native
@pytest.mark.parametrize("passes", [(), ("fuse-norm-linear",), ("fuse-residual", "dead-code")])
def test_any_passes_give_the_same_tokens(
    small: Path, tmp_path: Path, engine_of: Build, passes: tuple[str, ...]
) -> None:
    options = BuildOptions(
        small, tmp_path / "engine", passes=passes, profile=(1, 8, 128), max_num_seqs=8
    )
    build(options)
    assert answer(tmp_path / "engine") == answer(engine_of(small))
    assert f"--passes {','.join(passes) or 'none'}" in options.command


def test_no_such_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fuse-all' isn't a pass; there are"):
        BuildOptions("stories", tmp_path / "engine", passes=("fuse-all",))


@needs_native
@pytest.mark.parametrize("kv", ["auto", "int8", "kivi"])
def test_export_build_run(small: Path, tmp_path: Path, kv: str) -> None:
    """The graph is the export's, so is the cache's format, and nothing is compiled to run."""
    weights = NewWeights("w4a16-g64", head="w8a16")
    export_model(small, tmp_path / "export", weights=weights, kv_cache_dtype=kv)
    report = build(
        BuildOptions(tmp_path / "export", tmp_path / "engine", profile=(1, 8, 128), max_num_seqs=8)
    )
    assert report["graph"]["source"] == "that of the export"
    before = compile_counter.total()
    blocks = POSITIONS // 32 + 8  # the longest sequence, and more
    engine = LLM(tmp_path / "engine", num_gpu_blocks_override=blocks)
    assert compile_counter.total() == before
    limits = {"num_gpu_blocks_override": blocks, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    plain = LLM(tmp_path / "export", **limits)
    assert engine.runtime.layout.stored == plain.runtime.layout.stored
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    a, b = (llm.generate(["Once upon a time"], params)[0].outputs[0] for llm in (engine, plain))
    assert a.token_ids == b.token_ids and a.logprobs == b.logprobs


def test_an_engine_of_fewer_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl who had a red ball. " * 20)
    vocabulary = VocabularyChoice.parse("1200", (text,))
    export_model("stories", tmp_path / "export", reduce_vocab=vocabulary)
    build(
        BuildOptions(tmp_path / "export", tmp_path / "engine", profile=(1, 8, 128), max_num_seqs=8)
    )
    prompt = "Once upon a time, there was a zebra"
    assert answer(tmp_path / "engine", prompt) == answer(tmp_path / "export", prompt)
    assert torch.tensor(answer(tmp_path / "engine", prompt)).max() < VOCAB


def test_what_an_export_holds_that_was_tampered_with(tmp_path: Path) -> None:
    """Its graph is never read by a build, and a changed file is told from what was written."""
    export = export_model("stories", tmp_path / "export", kv_cache_dtype="int8", max_model_len=128)
    again = export_model(export.folder, tmp_path / "again")
    assert again.manifest.choices["kv_cache_dtype"] == "int8"
    assert again.manifest.max_model_len == 128
    with pytest.raises(ConfigError, match=f"more than the {POSITIONS} positions"):
        export_model("stories", tmp_path / "long", max_model_len=8 * POSITIONS)
    LLM(export.folder, verify=True, num_gpu_blocks_override=8)
    file = export.folder / "graph.pt2"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for call in (
        lambda: LLM(export.folder, verify=True),
        lambda: build(BuildOptions(export.folder, tmp_path / "engine")),
    ):
        with pytest.raises(ModelError, match=r"graph\.pt2 has been changed since"):
            call()


@needs_native
def test_another_length_than_it_was_exported_for(tmp_path: Path) -> None:
    export_model("stories", tmp_path / "export", max_model_len=256)
    options = BuildOptions(
        tmp_path / "export", tmp_path / "engine", max_model_len=128, profile=(1, 8, 64)
    )
    assert build(options)["graph"]["source"] == "exported now"
    assert LLM(tmp_path / "engine").runtime.model.max_model_len == 128
    with open_reader(Variant(tmp_path / "engine"), longest(str(tmp_path / "engine"))) as reader:
        assert reader.read(list(range(5, 105)), 1).logits.shape == (99, VOCAB)

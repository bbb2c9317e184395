"""Causes of low acceptance: each is made, and found; a pair that fits shows none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.stories import STORIES, VOCAB
from tests.models.tiny import make_tiny

from penstock.bench.finding import Finding
from penstock.bench.speculate import stale
from penstock.bench.speculate.checkup import (
    Checkup,
    check_up,
    head_findings,
    raw_findings,
    temperature_findings,
)
from penstock.bench.speculate.mismatch import folder_findings
from penstock.bench.speculate.stale import cache_findings, stale_blocks
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.engine import Engine
from penstock.hardware import Peaks
from penstock.runtime import Runtime, load_runtime
from penstock.runtime.eagle import PlacedEagle
from penstock.sampling import SamplingParams
from penstock.speculate.draft_model import DraftModelProposer

PEAKS = Peaks(2e10, 1e11, 0.0, 2, "2026-11-22T00:00:00+00:00")

Make = Callable[[Callable[[dict[str, Any], dict[str, Any]], None]], Path]


@pytest.fixture
def changed(tmp_path: Path) -> Make:
    """The embedded model with another tokenizer.json or tokenizer_config.json."""

    def make(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
        folder = tmp_path / "draft"
        shutil.copytree(STORIES, folder)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        held = [json.loads(file.read_text()) for file in files]
        change(*held)
        for file, content in zip(files, held, strict=True):
            file.write_text(json.dumps(content))
        return folder

    return make


def swap(tokens: dict[str, Any], _: dict[str, Any]) -> None:
    """Ids 1000 and 1001 change places."""
    vocab = tokens["model"]["vocab"]
    names = {i: token for token, i in vocab.items()}
    vocab[names[1000]], vocab[names[1001]] = 1001, 1000


def cut(tokens: dict[str, Any], _: dict[str, Any]) -> None:
    """The same tokens, most of which no text is merged to."""
    del tokens["model"]["merges"][100:]


def other_template(_: dict[str, Any], config: dict[str, Any]) -> None:
    config["chat_template"] = config["chat_template"].replace("<|im_start|>", "### ")


def no_template(_: dict[str, Any], config: dict[str, Any]) -> None:
    del config["chat_template"]


def test_permuted_tokens(changed: Make) -> None:
    """Found before the engine would refuse them, and nothing is run."""
    draft = changed(swap)
    found = check_up("stories", SpeculativeConfig.of({"model": draft}), PEAKS)
    (one,) = found.findings
    assert (one.check, one.level, found.runs, found.rates) == ("tokenizer", "mismatch", False, {})
    assert f"2 of {VOCAB:,} ids" in one.text and "from id 1000 on" in one.text


def test_texts_cut_otherwise(changed: Make) -> None:
    (one,) = folder_findings(STORIES, changed(cut))
    assert (one.check, one.level) == ("tokenizer", "mismatch")
    assert "Ids mean the same" in one.text


def test_another_template(changed: Make) -> None:
    (one,) = folder_findings(STORIES, changed(other_template))
    assert (one.check, one.level) == ("template", "mismatch")
    assert "'### user" in one.text and "'<|im_start|>user" in one.text
    assert "from character 13 " in one.text  # behind <|endoftext|>


def test_no_template(changed: Make) -> None:
    draft = changed(no_template)
    (one,) = folder_findings(STORIES, draft)
    assert one.check == "template" and "has none" in one.text
    assert folder_findings(draft, STORIES) == []  # a target without one isn't asked to chat


def test_a_template_runs_all_the_same(changed: Make) -> None:
    found = check_up("stories", SpeculativeConfig.of({"model": changed(other_template)}), PEAKS)
    assert found.runs and [one.check for one in found.findings if one.level != "hint"] == [
        "template"
    ]
    assert found.rates["temperature 0"] == 1.0  # it is the same model


def test_a_pair_that_fits() -> None:
    asked = SpeculativeConfig.of({"model": "stories", "num_speculative_tokens": 3})
    found = check_up("stories", asked, PEAKS)
    assert found.checks == ["tokenizer", "template", "temperature", "raw text", "cache"]
    assert [one for one in found.findings if one.check != "temperature"] == []
    assert set(found.rates.values()) == {1.0} and found.positions > 500
    assert json.loads(json.dumps(found.as_dict()))["runs"] is True


def test_without_a_model(tmp_path: Path) -> None:
    """N-grams of a folder without a tokenizer: ids, and no conversation."""
    folder = tmp_path / "bare"
    shutil.copytree(STORIES, folder, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    found = check_up(str(folder), SpeculativeConfig("ngram"), PEAKS)
    assert found.checks == ["temperature", "cache"]
    assert set(found.rates) == {"temperature 0", "temperature 1"} and found.positions > 0


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


def loaded(drafts: dict[str, Any], **forms: Any) -> tuple[EngineConfig, Runtime]:
    config = EngineConfig.of(
        model="stories", max_model_len=128, max_num_seqs=2, speculative_config=drafts, **forms
    )
    return config, load_runtime(config)


DRAFTS = {"model": "stories", "quantization": "w4a8", "num_speculative_tokens": 3}


@pytest.mark.parametrize("which", ["target", "draft model"])
def test_a_corrupted_block(which: str) -> None:
    """One byte of a layer's second block."""
    config, runtime = loaded({**DRAFTS, "adaptive": False})
    engine = Engine(config, runtime)
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine.add_request("a", list(range(5, 25)), params)
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 50:
        engine.step()
    (sequence,) = engine.scheduler.running
    size = runtime.layout.block_size
    assert runtime.draft is not None and engine.speculation is not None
    proposer = engine.speculation.proposer
    assert isinstance(proposer, DraftModelProposer)
    blocks, known = proposer.computed(sequence)
    assert blocks[:2] == sequence.blocks[:2] and known >= 2 * size
    findings, positions = stale_blocks(engine, sequence)
    assert findings == [] and positions >= 4 * size
    kv = runtime.runner.kv if which == "target" else runtime.draft.runner.kv
    kv[3][1][blocks[1]].view(-1)[5] += 1
    (found,), _ = stale_blocks(engine, sequence)
    assert (found.check, found.level) == ("cache", "bug")
    assert f"The {which}'s keys and values in layer 3" in found.text
    assert f"positions {size} to {2 * size - 1}" in found.text


def test_layers_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of attending layers are looked at; a fresh cache goes on by chunks."""
    folder = make_tiny("qwen3_5", tmp_path).folder
    found = check_up(str(folder), SpeculativeConfig("suffix"), PEAKS)
    assert found.findings == [] or {f.level for f in found.findings} == {"hint"}
    assert found.positions > 0
    config = EngineConfig.of(
        model=folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2, dtype="float32"
    )
    runtime = load_runtime(config)
    engine = Engine(config, runtime)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.add_request("a", [3 + i * i % 300 for i in range(240)], params)
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 5:
        engine.step()
    (sequence,), size = engine.scheduler.running, runtime.layout.block_size
    monkeypatch.setattr(stale, "CHUNK", 64)
    findings, positions = stale_blocks(engine, sequence)
    assert findings == [] and positions == 240 // size * size
    runtime.runner.kv[0][1][sequence.blocks[4]].view(-1)[5] += 1  # of the layer that attends
    (wrong,), _ = stale_blocks(engine, sequence)
    assert f"positions {4 * size} to {5 * size - 1}" in wrong.text


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_corrupted_block_of_a_head(adaptive: bool) -> None:
    """Its keys and values are computed again by the target's states, those of a prompt too."""
    config, runtime = loaded({"method": "eagle", "adaptive": adaptive})
    engine = Engine(config, runtime)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.add_request("a", list(range(5, 75)), params)
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 40:
        engine.step()
    (sequence,), size = engine.scheduler.running, runtime.layout.block_size
    findings, positions = stale_blocks(engine, sequence)
    of_target = sequence.num_computed // size * size
    assert findings == [] and positions >= of_target + 2 * size
    assert isinstance(runtime.draft, PlacedEagle)
    runtime.draft.kv[0][0][sequence.blocks[1]].view(-1)[5] += 1
    (found,), _ = stale_blocks(engine, sequence)
    assert "The EAGLE head's keys and values in layer 0" in found.text
    assert f"positions {size} to {2 * size - 1}" in found.text


@pytest.mark.parametrize(
    ("drafts", "forms"),
    [
        (DRAFTS, {"kv_cache_dtype": "int4"}),
        ({"method": "self", "num_speculative_tokens": 3}, {"kv_cache_dtype": "int8"}),
        ({"method": "suffix"}, {"dtype": "float32"}),
        ({"method": "eagle"}, {"kv_cache_dtype": "int8"}),
        ({"method": "eagle", "tree_width": 1}, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_caches_hold_what_their_tokens_give(drafts: Any, forms: dict[str, Any]) -> None:
    config, runtime = loaded({**drafts, "adaptive": False}, **forms)
    prompts = [list(range(5, 25)), [7, 8, 9] * 8]
    findings, positions = cache_findings(config, runtime, prompts)
    assert findings == []
    both = "model" in drafts or drafts["method"] == "eagle"
    assert positions >= (4 if both else 2) * runtime.layout.block_size


@pytest.mark.parametrize("drafts", [{"method": "ngram"}, {"method": "eagle", "tree_width": 1}])
def test_a_cache_with_a_window_is_not_compared(drafts: dict[str, Any]) -> None:
    config, runtime = loaded(drafts, kv_cache_dtype="kivi")
    assert cache_findings(config, runtime, [[5, 6, 7] * 8]) == ([], 0)


# ── rates ────────────────────────────────────────────────────────────────────────────────────────


def texts(findings: list[Finding]) -> str:
    assert all(one.level == "hint" for one in findings)
    return " ".join(one.text for one in findings)


def test_temperature_against_break_even() -> None:
    assert temperature_findings(0.8, 0.6, 0.5) == []
    told = texts(temperature_findings(0.8, 0.4, 0.5))
    assert "at a temperature of 1: guesses pay from 50% on" in told and "40% at 1" in told
    assert "a lower temperature brings more" in told
    told = texts(temperature_findings(0.3, 0.2, 0.5))
    assert "of 0 and of 1" in told and "a lower temperature" not in told
    assert "No rate would pay" in texts(temperature_findings(1.0, 0.9, None))
    assert "Nothing was guessed" in texts(temperature_findings(None, None, 0.5))
    assert "– at 0" in texts(temperature_findings(None, 0.1, 0.5))


def test_raw_text_against_a_conversation() -> None:
    assert raw_findings(0.6, 0.6) == raw_findings(0.9, 0.6) == raw_findings(None, 0.6) == []
    told = texts(raw_findings(0.3, 0.6))
    assert "30%" in told and "60%" in told and "/v1/chat/completions" in told


def test_heads_of_another_model(tmp_path: Path) -> None:
    """Of the same sizes: all but the embedding is random."""
    folder = tmp_path / "other"
    shutil.copytree(STORIES, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if "proj" in name:
            tensors[name] = torch.randn(tensor.shape).to(tensor.dtype) * 0.05
    save_file(tensors, file, {"format": "pt"})
    for model, heads in ((str(folder), "stories-eagle"), ("stories", "stories-eagle")):
        found = check_up(model, SpeculativeConfig.of({"method": "eagle", "model": heads}), PEAKS)
        assert "heads" in found.checks and found.runs
        told = [one.text for one in found.findings if one.check == "heads"]
        assert (len(told) == 1) == (model != "stories")
        assert all("may be another's" in text for text in told)
    assert head_findings([None, 0.04, 0.06]) == head_findings([None]) == []


def test_findings_are_of_what_runs() -> None:
    """A bug and other tokens fail the command, other templates and hints don't."""
    found = Checkup("ngram")
    assert found.runs
    for check, level, runs in (("cache", "bug", False), ("template", "mismatch", True)):
        assert replace(found, findings=[Finding(check, level, "")]).runs is runs  # type: ignore[arg-type]

"""From a configuration to a runtime, on the smallest published model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import InvalidPromptError, ModelNotFoundError, OutOfCacheError, TokenizerError
from penstock.hardware import Hardware
from penstock.kernels import native
from penstock.runtime import device, load_runtime

FOLDER = Path(__file__).resolve().parents[2].parent / "shared/data/models/stories260K/hf"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no {FOLDER}")


def test_everything_an_engine_needs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        runtime = load_runtime(EngineConfig.of(model=FOLDER, max_num_seqs=3))
    assert runtime.num_blocks == 3 * (512 // 32 + 1)  # three sequences, and one to grow into
    assert runtime.layout.heads == ((4, 8),) * 5
    assert runtime.layout.dtype is runtime.model.dtype is torch.float32
    assert len(runtime.runner.kv) == 5
    assert runtime.runner.kv[0][0].shape[0] == runtime.num_blocks
    assert runtime.tokenizer is not None and runtime.tokenizer.vocab_size == 512
    assert "up to 512 tokens a sequence; cache of 51 blocks × 32 tokens" in caplog.text


def test_choices_reach_their_place() -> None:
    config = EngineConfig.of(
        model=FOLDER, dtype="bfloat16", max_model_len=100, block_size=64, num_blocks=7,
        skip_tokenizer_init=True,
    )  # fmt: skip
    runtime = load_runtime(config)
    assert runtime.model.dtype is runtime.layout.dtype is torch.bfloat16
    assert (runtime.model.max_model_len, runtime.layout.block_size) == (100, 64)
    assert runtime.num_blocks == 7
    assert runtime.tokenizer is None


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        load_runtime(EngineConfig.of(model=FOLDER, tokenizer=tmp_path))
    with pytest.raises(ModelNotFoundError):
        load_runtime(EngineConfig.of(model=tmp_path / "nothing"))


def test_a_machine_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the cache is allocated, with the length that would fit."""
    block = 2 * 32 * 5 * 4 * 16 * 4  # heads of 8 are padded to 16
    full = Hardware("a small one", 1, (), 1 << 30, available_bytes=10 * block)
    monkeypatch.setattr(device, "detect", lambda: full)
    with pytest.raises(OutOfCacheError, match="Lower max_model_len to 288"):
        load_runtime(EngineConfig.of(model=FOLDER))
    runtime = load_runtime(EngineConfig.of(model=FOLDER, max_model_len=288))
    assert runtime.num_blocks == 9


@pytest.mark.parametrize("eager", [False, True])
def test_how_a_step_runs(eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        config = EngineConfig.of(
            model=FOLDER, num_blocks=20, enforce_eager=eager, skip_tokenizer_init=True
        )
        program = load_runtime(config).runner.program
    if eager:
        assert program is None and "one by one: enforce_eager is set" in caplog.text
    elif native.handle is None:
        assert program is None and f"one by one: {native.reason}" in caplog.text
    else:
        assert program is not None and "one native call of 33 operators" in caplog.text


def test_an_added_token_that_the_model_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that walks the tokenizer's ids goes beyond the model's."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    content["added_tokens"].append({"id": 512, "content": "<image>", "special": True, **flags})
    file.write_text(json.dumps(content))
    llm, plain = LLM(str(folder), dtype="float32"), LLM(str(FOLDER), dtype="float32")
    assert "the first of them '<image>' (512)" in caplog.text
    asked = [
        {"structured_outputs": {"regex": "[a-z]{3}<image>[0-9]{2}"}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"stop": ["time", "<image>"]},
        {"token_healing": True},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ["<", "a"]},
        {"repetition_penalty": 1.3, "min_tokens": 5, "logprobs": 3},
    ]
    for one in asked:
        params = SamplingParams(temperature=0.0, max_tokens=24, **one)
        got, want = (x.generate("Once upon a", params)[0].outputs[0] for x in (llm, plain))
        assert (got.token_ids, got.text) == (want.token_ids, want.text), one
    with pytest.raises(InvalidPromptError, match="Token id 512 is outside the vocabulary of 512"):
        llm.generate("Once <image>", SamplingParams(max_tokens=4))

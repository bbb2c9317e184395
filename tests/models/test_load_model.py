"""`load_model`: precision, length, stop tokens."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MAX_LEN, Make, Sequence

from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from penstock.models.load import load_model


def edited(tiny: Make, name: str, target: Path, *drop: str, **keys: object) -> Path:
    """A copy of a tiny checkpoint with other keys in its config."""
    folder = Path(shutil.copytree(tiny(name).folder, target / name))
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    return folder


def test_loaded_model(tiny: Make) -> None:
    loaded = load_model(tiny("llama").folder)
    assert loaded.spec.family == "llama"
    assert loaded.dtype == torch.float32
    assert loaded.max_model_len == 256
    assert not loaded.model.training
    assert all(not p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("asked", ["float32", "float", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama3-rope"])
def test_dtype(tiny: Make, name: str, asked: str) -> None:
    loaded = load_model(tiny(name).folder, dtype=asked)
    assert loaded.dtype == (torch.bfloat16 if asked == "bfloat16" else torch.float32)
    assert {p.dtype for p in loaded.model.parameters()} <= {loaded.dtype, torch.float32}
    assert loaded.model.head.packed["weight"].dtype == loaded.dtype
    assert Sequence(loaded.model).feed(torch.arange(5)).dtype == torch.float32


def test_auto_dtype(tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    folder = edited(tiny, "llama", tmp_path / "bfloat16", dtype="bfloat16")
    assert load_model(folder).dtype == torch.bfloat16
    folder = edited(tiny, "llama", tmp_path / "none", "dtype")
    assert load_model(folder).dtype == torch.float32
    assert not caplog.records
    folder = edited(tiny, "llama", tmp_path / "float16", "dtype", torch_dtype="float16")
    assert load_model(folder).dtype == torch.bfloat16
    assert len(caplog.records) == 1
    assert "it runs in bfloat16" in caplog.text
    assert load_model(folder, dtype="float32").dtype == torch.float32


def test_unknown_dtypes(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='float64' isn't one of auto, float32"):
        load_model(tiny("llama").folder, dtype="float64")
    folder = edited(tiny, "llama", tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedModelError, match="dtype 'float8_e4m3fn'"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "keys", "longest"),
    [
        ("llama", {}, 256),
        ("gpt2", {}, 256),
        ("llama3-rope", {}, 256),  # its factor of 8 is over an original 64, and isn't a length
        ("qwen2", {}, 256),
        ("qwen2", {"max_position_embeddings": 64}, 256),
        ("gemma3", {}, 256),  # only its global layers are scaled
        ("phi3-short", {}, 640),
        ("smollm3", {}, 256),
    ],
)
def test_max_model_len(
    tiny: Make, tmp_path: Path, name: str, keys: dict[str, Any], longest: int
) -> None:
    folder = edited(tiny, name, tmp_path, **keys)
    assert load_model(folder).max_model_len == keys.get("max_position_embeddings", longest)
    assert load_model(folder, max_model_len=longest).max_model_len == longest
    assert load_model(folder, max_model_len=7).max_model_len == 7
    with pytest.raises(
        ConfigError, match=f"max_model_len={longest + 1} is more than the {longest}"
    ):
        load_model(folder, max_model_len=longest + 1)
    with pytest.raises(ConfigError, match="positive integer"):
        load_model(folder, max_model_len=0)


def test_more_positions_than_there_is_memory_for(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.load._free", lambda device: 1 << 34)
    folder = edited(tiny, "llama", tmp_path, max_position_embeddings=1 << 31)
    said = r"of 2,147,483,648 positions need 1030\.8 GB .* 17\.2 GB .* set a lower max_model_len"
    with pytest.raises(ConfigError, match=said):
        load_model(folder)
    assert load_model(folder, max_model_len=64).max_model_len == 64


def test_linear_scaling_reaches_further(tiny: Make, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    folder = edited(tiny, "llama", tmp_path, rope_parameters=scaling)
    assert load_model(folder, max_model_len=1024).max_model_len == 1024


def test_max_model_len_chooses_longrope_factors(tiny: Make) -> None:
    folder = tiny("phi3-short").folder
    short = load_model(folder, max_model_len=MAX_LEN).model.layers[0].attention.table.cos_sin
    long = load_model(folder).model.layers[0].attention.table.cos_sin
    assert long.shape == (640, 12)
    assert not torch.equal(short, long[:MAX_LEN])
    assert torch.equal(short[:, 0], long[:MAX_LEN, 0])  # both begin with a factor of 1


@pytest.mark.parametrize("length", [None, MAX_LEN + 1, MAX_LEN])
def test_long_factors_for_short_prompts_are_said(
    tiny: Make, length: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(tiny("phi3-short").folder, max_model_len=length)
    said = [r.message for r in caplog.records if "Set max_model_len to at most 160" in r.message]
    assert len(said) == (length != MAX_LEN)


def test_what_generation_config_asks_and_is_not_applied(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = edited(tiny, "llama", tmp_path)
    file = folder / "generation_config.json"
    file.write_text('{"no_repeat_ngram_size": 0, "suppress_tokens": [], "bad_words_ids": null}')
    load_model(folder)
    assert "isn't applied" not in caplog.text
    file.write_text('{"no_repeat_ngram_size": 3, "suppress_tokens": [5], "bad_words_ids": [[3]]}')
    load_model(folder)
    assert "sets no_repeat_ngram_size, bad_words_ids, suppress_tokens, which isn't" in caplog.text


def test_stop_tokens_of_both_files(tiny: Make, tmp_path: Path) -> None:
    """As in transformers: those of generation_config.json, where it has some, are all."""
    folder = edited(tiny, "llama", tmp_path, eos_token_id=[2, 7])
    file = folder / "generation_config.json"
    for more, merged in ((9, (9,)), ([7, 11, 7], (7, 11)), (None, (2, 7))):
        file.write_text(json.dumps({"eos_token_id": more, "temperature": 0.6}))
        loaded = load_model(folder)
        assert loaded.eos_token_ids == merged
        assert loaded.generation == {"eos_token_id": more, "temperature": 0.6}
    file.write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(UnsupportedModelError, match="eos_token_id must be integers"):
        load_model(folder)
    file.unlink()
    assert load_model(folder).generation == {}


def test_stop_tokens_outside_the_vocabulary_are_said(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = edited(tiny, "llama", tmp_path, eos_token_id=[9999, 2])
    (folder / "generation_config.json").unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert load_model(folder).eos_token_ids == (2,)
    assert "eos_token_id 9999 isn't in the vocabulary of" in caplog.text


def test_progress_ends_at_the_whole(tiny: Make) -> None:
    seen: list[tuple[int, int]] = []
    load_model(tiny("gemma2").folder, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert {t for _, t in seen} == {done[-1]}


def test_strict(tiny: Make, tmp_path: Path) -> None:
    folder = edited(tiny, "llama", tmp_path, zeta=1)
    with pytest.warns(UserWarning, match="zeta"):
        load_model(folder)
    with pytest.raises(UnsupportedModelError, match="zeta"):
        load_model(folder, strict=True)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        load_model(tmp_path / "nothing")


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="is an adapter, which needs its model: penstock"):
        load_model(tmp_path)

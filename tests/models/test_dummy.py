"""What random weights would ignore, or what can't hold them, is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.stories import PARAMETERS, STORIES

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.hardware import detect
from penstock.models import load


def folder_with(folder: Path, **settings: Any) -> Path:
    config = json.loads((STORIES / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_weights_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "detect", lambda: replace(detect(), available_bytes=10_000_000))
    words = re.escape(f"need {4 * PARAMETERS / 1e6:.1f} MB in float32, but 10.0 MB")
    with pytest.raises(ConfigError, match=words):
        load.load_dummy(folder_with(tmp_path), dtype="float32")


def test_what_a_config_says_of_its_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"says that its weights are quantized \(awq\).*'w4a16-g128-asym'"
    ):
        load.load_dummy(folder_with(tmp_path, quantization_config={"quant_method": "awq"}))
    with pytest.raises(UnsupportedModelError, match="says dtype 'float64'; float32"):
        load.load_dummy(folder_with(tmp_path, torch_dtype="float64"))


def test_formats_that_compute_in_bfloat16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'w8a8' computes in bfloat16 .* dtype='float32'"):
        load.load_dummy(folder_with(tmp_path), quantization="w8a8", dtype="float32")


def test_a_file(tmp_path: Path) -> None:
    file = Path(shutil.copy(STORIES / "config.json", tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match=r"reads a folder's config.json, but .* is a file"):
        load.load_dummy(file)

"""Weights that can't fit are refused before they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.hardware import detect
from penstock.models import load

STORIES = Path(load.__file__).parents[1] / "assets" / "stories"


def test_weights_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(detect(), available_bytes=10_000_000)
    monkeypatch.setattr(load, "detect", lambda: small)
    with pytest.raises(ConfigError, match=r"need 0\.0 GB as torch\.float32.*bfloat16.* halves"):
        load.load_model(STORIES, dtype="float32")

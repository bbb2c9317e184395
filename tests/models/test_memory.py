"""Weights that can't fit are refused before they are read."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.models.stories import PARAMETERS, STORIES

from penstock.errors import ConfigError
from penstock.hardware import detect
from penstock.models import load


def test_weights_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(detect(), available_bytes=10_000_000)
    monkeypatch.setattr(load, "detect", lambda: small)
    need = re.escape(f"need {4 * PARAMETERS / 1e6:.1f} MB in float32, but 10.0 MB")
    with pytest.raises(ConfigError, match=rf"{need} .* halve them by dtype=.bfloat16"):
        load.load_model(STORIES, dtype="float32")


@pytest.mark.parametrize(("quantization", "free"), [(None, 2.19), ("w8a8", 1.15), ("w4a8", 0.82)])
def test_what_the_weights_need_in_their_own_format(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, free: float
) -> None:
    """Two bytes a parameter, or half of that, or less."""
    enough = replace(detect(), available_bytes=int(free * PARAMETERS))
    monkeypatch.setattr(load, "detect", lambda: enough)
    load.load_model(STORIES, quantization=quantization)
    monkeypatch.setattr(load, "detect", lambda: replace(detect(), available_bytes=2_000_000))
    with pytest.raises(ConfigError, match=r"2\.0 MB of memory are free") as caught:
        load.load_model(STORIES, quantization=quantization)
    assert ("w8a8" in str(caught.value).split("free:")[1]) == (quantization is None)

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
    with pytest.raises(
        ConfigError,
        match=r"need 2\d\.\d MB in float32, but 10\.0 MB .* halve them by dtype=.bfloat16",
    ):
        load.load_model(STORIES, dtype="float32")


@pytest.mark.parametrize(("quantization", "free"), [(None, 12.0), ("w8a8", 6.3), ("w4a8", 4.5)])
def test_what_the_weights_need_in_their_own_format(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, free: float
) -> None:
    """5.5 M parameters: 11 MB, or half of that, or less."""
    monkeypatch.setattr(load, "detect", lambda: replace(detect(), available_bytes=int(free * 1e6)))
    load.load_model(STORIES, quantization=quantization)
    monkeypatch.setattr(load, "detect", lambda: replace(detect(), available_bytes=2_000_000))
    with pytest.raises(ConfigError, match=r"2\.0 MB of memory are free") as caught:
        load.load_model(STORIES, quantization=quantization)
    assert ("w8a8" in str(caught.value).split("free:")[1]) == (quantization is None)

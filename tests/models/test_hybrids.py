"""Which layers of Qwen3-Next's kin attend: said by a list, by an interval, or by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import CASES

from penstock.errors import UnsupportedModelError
from penstock.models.registry import read_spec

FULL, LINEAR = "full_attention", "linear_attention"


def attending(folder: Path, name: str, **changes: Any) -> list[int]:
    """The layers that attend of a config with these values; None: without the key."""
    case = CASES[name]
    config = json.loads(case.make_config().to_json_string(use_diff=True))
    config |= {"architectures": [case.model], "num_hidden_layers": 6, "layer_types": None} | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    layers = read_spec(folder, strict=True).decoder.layers
    return [i for i, layer in enumerate(layers) if not layer.attention.has_state]


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5", "qwen3_5-moe"])
@pytest.mark.parametrize(("interval", "want"), [(None, [3]), (2, [1, 3, 5]), (3, [2, 5]), (6, [5])])
def test_an_interval(tmp_path: Path, name: str, interval: int | None, want: list[int]) -> None:
    """As transformers' own configs have it."""
    assert attending(tmp_path, name, full_attention_interval=interval) == want
    case = CASES[name]
    given = {} if interval is None else {"full_attention_interval": interval}
    changes = {**case.changes, "num_hidden_layers": 6, "layer_types": None}
    theirs = type(case.make_config())(**changes, **given)
    assert [i for i, kind in enumerate(theirs.layer_types) if kind == FULL] == want


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5", "qwen3_5-moe"])
def test_both(tmp_path: Path, name: str) -> None:
    """Where they differ the list counts, as in transformers, and a warning says so."""
    types = [LINEAR, FULL] * 3
    said = {"layer_types": types, "full_attention_interval": 2}
    assert attending(tmp_path, name, **said) == [1, 3, 5]
    types = [FULL, *[LINEAR] * 4, FULL]
    with pytest.warns(UserWarning, match="by full_attention_interval 2 that other layers attend"):
        assert attending(tmp_path, name, **said | {"layer_types": types}) == [0, 5]


def test_layers_of_one_kind(tmp_path: Path) -> None:
    for interval, kind in ((1, FULL), (7, LINEAR)):
        with pytest.raises(
            UnsupportedModelError, match=rf"interval {interval} of 6 layers names {kind} alone"
        ):
            attending(tmp_path, "qwen3_5", full_attention_interval=interval)
    with pytest.raises(UnsupportedModelError, match="layer_types names linear_attention alone"):
        attending(tmp_path, "qwen3_5", layer_types=[LINEAR] * 6)
    with pytest.raises(UnsupportedModelError, match="full_attention_interval must be a positive"):
        attending(tmp_path, "qwen3_5", full_attention_interval=0)

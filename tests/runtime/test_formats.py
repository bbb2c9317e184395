"""Weight formats as an engine's manifest says them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch

from penstock.errors import EngineFolderError
from penstock.quant import SCHEMES, Dense, Scheme, WeightFormats, format_of, parse_scheme
from penstock.runtime.formats import decode_formats, encode

INT8 = asdict(Scheme("int8"))


@pytest.mark.parametrize("name", [*SCHEMES, "w4a8-g128-asym", "w8a8-static", "fp8-block"])
def test_back_from_json(name: str) -> None:
    plain = Dense(torch.bfloat16)
    formats = WeightFormats(format_of(parse_scheme(name)), plain, {"layers.0.mlp.up": plain})
    assert decode_formats(json.loads(json.dumps(encode(formats)))) == formats


@pytest.mark.parametrize("field", fields(Scheme), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [None, "other", -1, 1.0, [1], {}], ids=repr)
def test_other_schemes(field: Any, value: object) -> None:
    data = {"matrix": "bfloat16", "head": INT8 | {field.name: value}, "special": {}}
    with pytest.raises(EngineFolderError, match=r"formats\.head in its manifest"):
        decode_formats(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "aren't those of matrix"),
        ({"matrix": "bfloat16", "head": "bfloat16"}, "aren't those of matrix"),
        ({"matrix": "float64", "head": "bfloat16", "special": {}}, r"formats\.matrix .*'float64'"),
        ({"matrix": "bfloat16", "head": "bfloat16", "special": []}, "special .* is a list"),
        ({"matrix": "bfloat16", "head": "bfloat16", "special": {"x": 1}}, r"special\.x .* is 1,"),
    ],
)
def test_other_data(data: object, words: str) -> None:
    with pytest.raises(EngineFolderError, match=words):
        decode_formats(data)

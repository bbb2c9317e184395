"""`penstock bench structured`: tables, the file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

Run = Callable[..., Result]


def test_tables_and_file(penstock: Run, tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.jsonl"
    text = {"type": "array", "items": {"type": "string"}, "minItems": 9}
    schemas.write_text(f'{json.dumps(text)}\n{{"uniqueItems": true}}\n')
    file = tmp_path / "results" / "structured.json"
    found = penstock(
        "bench", "structured", "--schemas", schemas, "--num-prompts", 5, "--max-num-seqs", 2,
        "--max-tokens", 10, "--rounds", 1, "--json", file,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    for words in (
        "1 of 2 (50.0%), 1 refused", "2 of 2 found in the cache", "5 cut at --max-tokens",
        "masks, 2 at once", "overhead", "waited for masks", "jumps, compact", "all equal",
        "Refused 1: 'uniqueItems'",
    ):  # fmt: skip
        assert words in found.stdout
    told = json.loads(file.read_text())
    assert {"benchmark", "setup", "results", "hardware", "commit", "threads"} <= set(told)
    assert told["setup"]["schemas"] == "schemas.jsonl"
    assert told["results"]["overhead"]["batch_size"] == 2
    assert [one["whitespace"] for one in told["results"]["jump_forward"]] == ["any", "compact"]


def test_only_the_parts_that_are_asked_for(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "structured.json"
    found = penstock("bench", "structured", "--parts", "compile", "--json", file)
    assert found.exit_code == 0, found.output
    results = json.loads(file.read_text())["results"]
    assert results["compile"]["share"] == 1.0
    assert (results["outputs"], results["overhead"], results["jump_forward"]) == (None, None, [])


def test_invalid_outputs_fail_the_command(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonschema", reason="judges outputs")
    monkeypatch.setattr("penstock.bench.structured.outputs._problem", lambda *_: "it's broken")
    found = penstock(
        "bench", "structured", "--parts", "outputs", "--max-tokens", 64, "--num-prompts", 8
    )
    assert found.exit_code == 1
    assert "outputs aren't what they must be" in found.stderr and "it's broken" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schemas", "/no/such/schemas.json"], "no such file or folder"),
        (["--parts", "overheat"], "Did you mean 'overhead'?"),
        (["--max-tokens", "100000"], "Lower --max-tokens"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_refusals(penstock: Run, arguments: list[str], words: str) -> None:
    found = penstock("bench", "structured", *arguments)
    assert found.exit_code == 1
    assert words in " ".join(found.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    "words", ["structured", "speculate --method ngram", "latency", "throughput"]
)
def test_a_device_that_is_not_there(penstock: Run, words: str) -> None:
    found = penstock("bench", *words.split(), "--device", "cuda")
    assert found.exit_code == 1
    assert "device='cuda' can't be used" in found.output


def test_a_model_without_a_tokenizer(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    for file in base_model.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    found = penstock("bench", "structured", tmp_path)
    assert found.exit_code == 1
    assert "tokenizer" in found.stderr

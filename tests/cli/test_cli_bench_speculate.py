"""`penstock bench speculate`: tables, the file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.stories import POSITIONS
from typer.testing import Result

from penstock.hardware import Peaks

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch, known_peaks: Peaks) -> None:
    from penstock.bench.speculate import benchmark

    monkeypatch.setattr(benchmark, "measure_on", lambda device, hardware: known_peaks)


def test_tables_and_file(penstock: Run, tmp_path: Path) -> None:
    file, prompts = tmp_path / "results" / "speculate.json", tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nTom and\n")
    found = penstock(
        "bench", "speculate", "--speculative-config", '{"method": "self", "draft_layers": 2}',
        "--num-speculative-tokens", 2, "--fixed", "--max-tokens", 12, "--rounds", 1,
        "--prompts", prompts, "--json", file,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    shown = " ".join(found.stdout.split())
    for words in (
        "prompts.txt, 2 requests, 1 at once", "tokens/s, decoding", "speed-up",
        "predicted by the ledger", "all equal", "fixed, up to 2 tokens", "break-even",
        "where those before are", "nothing beside the target",
    ):  # fmt: skip
        assert words in shown
    told = json.loads(file.read_text())
    assert {"benchmark", "setup", "results", "peaks", "hardware", "commit"} <= set(told)
    assert told["setup"]["drafts"] == {
        "method": "self", "num_speculative_tokens": 2, "draft_layers": 2, "adaptive": False
    }  # fmt: skip
    (one,) = told["results"]["workloads"]
    assert {
        "tokens_per_s", "speedup", "speedup_by_round", "with_prompts", "expected", "acceptance",
        "costs", "break_even_acceptance", "best_length", "control", "share_of_floor",
    } <= set(one)  # fmt: skip
    assert one["speedup_by_round"] == [one["speedup"]]
    assert one["costs"]["verification"]["2"]["steps"] > 3
    assert len(one["acceptance"]["by_position"]) == 2


def test_token_ids_for_a_model_without_a_tokenizer(
    penstock: Run, base_model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in base_model.iterdir():
        if "tokenizer" not in file.name:
            (bare / file.name).symlink_to(file)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7, 8]}\n')
    found = penstock(
        "bench", "speculate", bare, "--planted", 0.9, "--num-speculative-tokens", 3,
        "--max-tokens", 16, "--rounds", 1, "--prompts", prompts,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "adaptive, up to 3 tokens" in " ".join(found.stdout.split())
    found = penstock("bench", "speculate", bare, "--planted", 0.9, "--max-tokens", 16)
    assert found.exit_code == 1
    assert "lists of token ids" in " ".join(found.stderr.split())


def test_outputs_that_differ_fail_the_command(
    penstock: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bench.speculate.runs._unequal", lambda *_: [3])
    found = penstock("bench", "speculate", "--planted", 1, "--max-tokens", 4, "--rounds", 1)
    assert found.exit_code == 1
    assert "stories 3: another output with drafts" in " ".join(found.stderr.split())


@pytest.mark.parametrize("output", ["7", '""', "[]", '["a"]', "[true, 5]"])
def test_an_output_that_is_none(penstock: Run, tmp_path: Path, output: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": [5, 6], "output": {output}}}\n')
    found = penstock("bench", "speculate", "--planted", "0.5", "--prompts", prompts)
    assert found.exit_code == 1, found.output
    assert '"output" must be a text or a list of token ids' in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Nobody guesses yet"),
        (["--speculative-config", "{"], "isn't JSON"),
        (["--speculative-config", '["self"]'], "must be an object"),
        (["--speculative-config", '{"methud": "self"}'], "Did you mean 'method'?"),
        (["--speculative-config", '{"method": "self"}', "--method", "self"], "both say method"),
        (["--speculative-config", '{"adaptive": true}', "--fixed"], "--fixed both say adaptive"),
        (["--method", "shelf"], "Did you mean 'self'?"),
        (["--method", "eagle3"], "holds an EAGLE-1 or 2 head: set method='eagle'"),
        (["--planted", "1.5"], "--planted 1.5 isn't a probability"),
        (["--planted", "-0.1"], "Choose one from 0"),
        (["--planted", "0.5", "--planted-cost", "-1"], "0 or more, not -1"),
        (["--method", "self", "--planted-cost", "1"], "no effect without --planted"),
        (["--planted", "0.5", "--method", "self"], "no use for 'method'"),
        (["--planted", "0.5", "--prompts", "/no/such/file"], "can't be read"),
        (
            ["--planted", "0.5", "--max-tokens", str(POSITIONS - 2)],
            f"but this model has {POSITIONS:,} positions",
        ),
        (["/no/such/model", "--planted", "0.5"], "/no/such/model"),
    ],
)
def test_refusals(penstock: Run, arguments: list[str], words: str) -> None:
    found = penstock("bench", "speculate", *arguments)
    assert found.exit_code == 1, found.output
    assert words in " ".join(found.stderr.split())

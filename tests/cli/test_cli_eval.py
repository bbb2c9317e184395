"""`penstock eval`: tables, JSON, drift between precisions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]

STORY = "Once upon a time, there was a little dog named Max. He loved to play in the park. " * 4


@pytest.fixture
def story(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text(STORY)
    return file


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    file = tmp_path / "talk.jsonl"
    ask = {"role": "user", "content": "Tell me a story about a frog."}
    file.write_text(json.dumps({"messages": [ask, {"role": "assistant", "content": "No."}]}))
    return file


def test_texts_and_dialogues(penstock: Run, story: Path, talk: Path, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "eval.json"
    result = penstock(
        "eval", "--text", story, "--dialogues", talk, "--against", "w8a8,kv=int8", "--json", kept
    )
    assert result.exit_code == 0, result.output
    for words in ("bits/byte", "story.txt", "Drift of w8a8,kv=int8", "end by themselves"):
        assert words in result.stdout
    found = json.loads(kept.read_text())
    (text,) = found["texts"]
    assert text["bytes"] == len(STORY) and 0 < text["bits_per_byte"] < 1.5
    assert 0 < text["drift"]["kl"] < 0.02
    assert found["dialogues"]["replies"] == 1
    assert found["setup"]["window"] == 1024 and found["against"] == "w8a8,kv=int8"


def test_against_an_embedded_model_by_its_name(penstock: Run, story: Path, tmp_path: Path) -> None:
    kept = tmp_path / "eval.json"
    result = penstock("eval", "--text", story, "--against", "stories-draft", "--json", kept)
    assert result.exit_code == 0, result.output
    assert json.loads(kept.read_text())["texts"][0]["drift"]["kl"] > 0.02


def test_replies_that_are_left_out_are_told(penstock: Run, talk: Path, tmp_path: Path) -> None:
    kept = tmp_path / "eval.json"
    result = penstock("eval", "--dialogues", talk, "--max-tokens", 1020, "--json", kept)
    assert result.exit_code == 0, result.output
    assert "replies left out: too long for the model" in result.stdout
    found = json.loads(kept.read_text())["dialogues"]
    assert (found["replies"], found["left_out"]) == (0, 1)


def test_a_run_is_kept_and_compared(penstock: Run, story: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert penstock("eval", "--text", story, "--save-run", run).exit_code == 0
    result = penstock("eval", "--text", story, "--reference-run", run, "--quantization", "w4a8")
    assert result.exit_code == 0, result.output
    assert "Drift from bfloat16" in result.stdout
    kept, about = tmp_path / "eval.json", json.loads((run / "run.json").read_text())
    del about["weights"]  # who wrote it needn't have named any
    (run / "run.json").write_text(json.dumps(about))
    again = penstock("eval", "--text", story, "--reference-run", run, "--json", kept)
    assert again.exit_code == 0, again.output
    assert "Drift from a kept run" in again.stdout
    assert json.loads(kept.read_text())["texts"][0]["drift"]["same_likeliest_token"] == 1.0
    other = penstock("eval", "--text", story, "--reference-run", run, "--window", "16")
    assert other.exit_code == 1 and "had a window of 1024 tokens" in other.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to score"),
        (["--text", "no such file"], "no such file"),
        (["--text", "STORY", "--against", "w3a1"], "w3a1"),
        (["--text", "STORY", "--against", "w8a8", "--reference-run", "x"], "both name a reference"),
        (["--dialogues", "TALK", "--save-run", "x"], "give --text"),
        (["--text", "STORY", "--reference-run", "x"], "isn't a complete run"),
        (["--text", "STORY", "--window", "8", "--stride", "8"], "stride must be at least 1"),
        (["--text", "STORY", "--window", "100000"], "100,000 tokens is larger than the 1,024"),
        (["--text", "STORY", "--dialogues", "TALK", "--window", "1025"], "Lower --window to 1024"),
        (["--dialogues", "."], "can't be read"),
    ],
)
def test_refusals(penstock: Run, story: Path, talk: Path, arguments: list[str], words: str) -> None:
    named = {"STORY": str(story), "TALK": str(talk)}
    result = penstock("eval", *(named.get(a, a) for a in arguments))
    assert result.exit_code == 1
    assert words in result.output

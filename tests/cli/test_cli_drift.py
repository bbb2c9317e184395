"""`penstock drift`: tables, JSON, plot, equality, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.stories import LAYERS, POSITIONS, VOCAB
from typer.testing import Result

from penstock.models.hub import resolve
from penstock.pipeline.vocabulary import reduce_vocabulary

Run = Callable[..., Result]

STORY = "Once upon a time, there was a little dog named Max. He loved to play in the park. " * 4


@pytest.fixture
def story(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text(f"{STORY}<|endoftext|>\n{STORY}")
    return file


def test_a_format_against_the_model(penstock: Run, story: Path, tmp_path: Path) -> None:
    kept, plot = tmp_path / "new" / "drift.json", tmp_path / "drift.svg"
    result = penstock(
        "drift", "stories", ":w4a8", "--text", story, "--json", kept, "--svg", plot, "--worst", "2"
    )
    assert result.exit_code == 0, result.output
    for words in (
        "Drift of stories:w4a8 from stories", "story.txt: 2 documents", "same likeliest token",
        "w4a8-g32, w8a8 head", f"layer {LAYERS - 1}", "what came",
    ):  # fmt: skip
        assert words in result.stdout
    found = json.loads(kept.read_text())
    assert found["a"]["variant"] == "stories" and found["b"]["weights"] == "w4a8-g32, w8a8 head"
    assert 0 < found["kl"] < found["kl_p99"] <= found["kl_max"] and not found["equal"]
    assert len(found["layers"]) == LAYERS + 1 and len(found["worst"]) == 2
    one = found["worst"][0]
    assert one["context"] + one["token"] in STORY and one["kl"] == found["kl_max"]
    assert plot.read_text().startswith("<svg")


def test_eval_finds_the_same_figures(penstock: Run, story: Path, tmp_path: Path) -> None:
    drift, scores = tmp_path / "drift.json", tmp_path / "eval.json"
    common = ("--text", story, "--window", "64", "--stride", "16")
    assert penstock("drift", "stories", ":w8a8,kv=int8", *common, "--json", drift).exit_code == 0
    result = penstock("eval", *common, "--against", "w8a8,kv=int8", "--json", scores)
    assert result.exit_code == 0, result.output
    mine, theirs = json.loads(drift.read_text()), json.loads(scores.read_text())["texts"][0]
    assert {name: mine[name] for name in theirs["drift"]} == theirs["drift"]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("stories", ":float32", True),
        ("stories", ":tf32", True),
        ("stories:w4a8", ":w8a8", True),
        ("stories:kv=int8", ":", True),
        ("stories:float32", ":tf32", False),
        ("stories", ":w4a8,kv=int8", False),
        ("stories:w4a8", ":kv=int8", False),  # neither is finer in all
    ],
)
def test_a_reference_less_precise_than_what_is_held_against_it(
    penstock: Run, story: Path, one: str, other: str, said: bool
) -> None:
    few = ("--text", story, "--max-bytes", "100", "--no-layers", "--worst", "0")
    result = penstock("drift", one, other, *few)
    assert result.exit_code == 0, result.output
    assert ("so most of this drift is its own rounding" in result.stdout) is said


def test_eval_tells_that_the_model_is_the_less_precise_one(penstock: Run, story: Path) -> None:
    few = ("--text", story, "--max-bytes", "100")
    result = penstock("eval", *few, "--against", "tf32")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("The model is less precise than the other one") == 1
    fine = penstock("eval", *few, "--dtype", "float32", "--against", "tf32")
    assert fine.exit_code == 0 and "less precise" not in fine.stdout, fine.output


def test_equal_ones_are_said_to_be(penstock: Run, story: Path) -> None:
    result = penstock("drift", "stories", ":eager", "--text", story, "--max-bytes", "200")
    assert result.exit_code == 0, result.output
    assert f"× {VOCAB:,} logits are ==." in result.stdout
    assert f"Equal after all {LAYERS} layers" in result.stdout
    assert "positions are few" in result.stdout


def test_layers_and_worst_may_be_left_out(penstock: Run, story: Path, tmp_path: Path) -> None:
    kept = tmp_path / "drift.json"
    more = ("--no-layers", "--worst", "0", "--max-bytes", "200", "--json", kept)
    result = penstock("drift", "stories", ":w8a8", "--text", story, *more)
    assert result.exit_code == 0, result.output
    assert "layer" not in result.stdout and "what came" not in result.stdout
    found = json.loads(kept.read_text())
    assert found["layers"] == [] == found["worst"]


def test_two_models(penstock: Run, story: Path, tmp_path: Path) -> None:
    """Another folder, and one whose tokenizer numbers two tokens the other way."""
    copy = tmp_path / "copy"
    shutil.copytree(resolve("stories"), copy)
    result = penstock("drift", "stories", copy, "--text", story, "--max-bytes", "200")
    assert result.exit_code == 0 and "logits are ==" in result.stdout, result.output
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = penstock("drift", "stories", copy, "--text", story)
    assert result.exit_code == 1 and "The tokenizers differ: token" in result.output


def test_a_reduced_vocabulary(penstock: Run, story: Path, tmp_path: Path) -> None:
    small, kept = tmp_path / "small", tmp_path / "drift.json"
    reduce_vocabulary("stories", small, size=700, texts=["Once upon a time there was a dog."])
    common = ("--text", story, "--window", "64")
    result = penstock("drift", "stories", small, *common, "--json", kept)
    assert result.exit_code == 0, result.output
    for words in (
        "× 700 logits are ==", f"Equal after all {LAYERS} layers", f"700 of {VOCAB:,} tokens",
        f"to the {VOCAB - 700:,} tokens that", "KL is of the 700 that both have",
        "written in others",
    ):  # fmt: skip
        assert words in " ".join(result.stdout.split())
    found = json.loads(kept.read_text())
    assert found["kl"] == 0 and found["shared_tokens"] == 700
    assert 0 < found["outside"][0]["mean"] < 1 and found["outside"][1]["tokens"] == 0
    assert found["perplexity"] < found["reference_perplexity"]
    turned = penstock("drift", small, "stories", *common)
    assert turned.exit_code == 0 and "× 700 logits are ==" in turned.stdout, turned.output


def test_eval_of_a_reduced_vocabulary(penstock: Run, story: Path, tmp_path: Path) -> None:
    small, scores = tmp_path / "small", tmp_path / "eval.json"
    reduce_vocabulary("stories", small, size=700, texts=["Once upon a time there was a dog."])
    common = ("--text", story, "--window", "64")
    result = penstock("eval", small, *common, "--against", "stories:", "--json", scores)
    assert result.exit_code == 0, result.output
    (text,) = json.loads(scores.read_text())["texts"]
    assert text["drift"]["kl"] == 0 and text["bits_per_byte"] > 0
    wrong = penstock("eval", "stories", *common, "--against", f"{small}:")
    assert wrong.exit_code == 1 and f"lacks {VOCAB - 700:,} tokens of the model" in wrong.output
    wrong = penstock("eval", small, *common, "--save-run", tmp_path / "run")
    assert wrong.exit_code == 1 and "a run on disk is of all of them" in wrong.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stories", ":w3a1", "--text", "STORY"], "'w3a1' isn't an option of a variant"),
        ([":w4a8", ":w8a8", "--text", "STORY"], "names no model"),
        (["stories", "nowhere/at/all", "--text", "STORY"], "nowhere"),
        (["stories", ":", "--text", "no such file"], "no such file"),
        (["stories", ":", "--text", "EMPTY"], "holds no text to score"),
        (
            ["stories", ":", "--text", "STORY", "--window", str(POSITIONS + 88)],
            f"larger than the {POSITIONS:,} positions",
        ),
        (["stories", ":", "--text", "STORY", "--window", "8", "--stride", "8"], "must be at least"),
        (["stories", ":w8a8,dtype=float32", "--text", "STORY"], "dtype='float32'"),
        (["stories", ":kv=int3", "--text", "STORY"], "int3"),
    ],
)
def test_refusals(
    penstock: Run, story: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "empty.txt").write_text("<|endoftext|>\n\n<|endoftext|>")
    named = {"STORY": str(story), "EMPTY": str(tmp_path / "empty.txt")}
    result = penstock("drift", *(named.get(a, a) for a in arguments))
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())

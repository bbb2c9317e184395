"""The whole recipe in one go, from text to models that other engines load."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.card import PROMPTS
from recipes.sources import LICENCES
from recipes.speculation.run import measure_again
from recipes.speculation.settings import Settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"


def recipes(work: Path, *words: str) -> str:
    """Run a command of the recipes; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "recipes", *words, "--work", str(work)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measure_draft(work: Path, folder: Path) -> None:
    """As `python -m recipes.speculation measure --keep` does."""
    texts = folder / "texts.jsonl"
    entry = {"text": "Anna saw the dog. " * 20, "held_out": True}
    texts.write_text("".join(json.dumps(entry) + "\n" for _ in range(3)))
    settings = Settings(
        str(work / "chat"), texts, folder, work / "draft", folder / "speculation",
        length=64, evaluate=2, depth=2,
    )  # fmt: skip
    measure_again(settings, seed=0, keep=True)


@pytest.mark.slow
def test_from_text_to_models(made_up_data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    recipes(work, "prepare", "--data", str(made_up_data), "--vocab-size", "512")
    run = ("--steps", "6", "--rows", "2", "--save-every", "5")
    said = recipes(work, "pretrain", "--size", "tiny", *run, "--steps", "43")  # 1% of the real run
    assert re.search(r"^step 40 of 43 .* [\d,]+ tokens/s, \d+\.\d% of \d+\.\d TFLOP/s$", said, re.M)
    recipes(work, "finetune", *run)
    recipes(work, "distill", "--size", "tiny", *run)
    for style in ("shakespeare", "verse"):
        recipes(work, "adapt", style, "--rank", "4", *run)
    table = recipes(work, "evaluate", "--max-bytes", "3000", "--max-dialogues", "2")
    figures = json.loads((work / "figures.json").read_text())
    assert {f["model"] for f in figures} >= {"base", "chat", "draft", "shakespeare"}
    assert table.count("\n| ") >= len(figures)
    assert all(f["value"] > 0 for f in figures if "bits a byte" in f["name"])

    card = (work / "chat" / "README.md").read_text()
    assert all(prompt in card for prompt, _ in PROMPTS)
    assert "CC BY-SA 4.0" in card
    assert next(iter(LICENCES)) in card

    measure_draft(work, tmp_path)
    printed = recipes(work, "ship", "--assets", str(tmp_path / "assets"))
    assert "| chat | stories-chat |" in printed
    (output,) = LLM(str(tmp_path / "assets" / "stories-chat")).generate("Anna", SamplingParams())
    assert output.outputs[0].token_ids

    parts = tmp_path / "parts"
    recipes(work, "split", str(parts), "base", "draft")
    joined = tmp_path / "joined"
    assert recipes(joined, "join", str(parts)).split() == ["base", "draft"]

    llm = LLM(str(joined / "base"))
    theirs = AutoModelForCausalLM.from_pretrained(joined / "base", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(joined / "base")("Anna saw the dog")["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    # penstock computes in bfloat16
    (found,) = output.outputs[0].logprobs
    for token, logprob in found.items():
        assert abs(float(expected[token]) - logprob.logprob) < 0.05


@pytest.mark.slow
def test_the_real_sources_are_read(tmp_path: Path) -> None:
    if not (DATA / "text" / "lcats_stories_train.jsonl").exists():
        pytest.skip(f"the texts aren't in {DATA}")
    printed = recipes(tmp_path, "prepare", "--data", str(DATA / "text"), "--limit", "8",
                      "--vocab-size", "1024")  # fmt: skip
    for source in ("novels", "tinystories", "science_fiction", "verse", "tools"):
        assert source in printed
    recipes(tmp_path, "pretrain", "--size", "tiny", "--steps", "2", "--rows", "2")
    assert (tmp_path / "base" / "model.safetensors").exists()

"""`penstock eval` on texts: windows, losses beside transformers', drift, and runs that are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.stories import VOCAB
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.bench.evaluate import evaluate, loss_of
from penstock.bench.reader import LocalReader, open_reader
from penstock.bench.reference_run import ReferenceRun, RunWriter
from penstock.bench.texts import Text, read_text, windows_of
from penstock.bench.variant import Variant
from penstock.errors import ConfigError, ModelError
from penstock.models.hub import resolve
from penstock.runtime import Runtime, load_runtime
from penstock.tokenizer import Tokenizer

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her "
    "dog, Max. One day, Lily and Max saw a big red ball under a tree. Lily wanted to play with it. "
    "She gave it to a boy who was crying. The boy was very happy, and they all played together. "
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("stories"))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime(Variant().config(128))


@pytest.mark.parametrize("length", [2, 3, 10, 11, 64, 65, 100])
@pytest.mark.parametrize(("window", "stride"), [(10, 5), (10, 9), (10, 1), (64, 32), (200, 7)])
def test_every_token_but_the_first_is_scored_once(length: int, window: int, stride: int) -> None:
    ids = list(range(length))
    scored: list[int] = []
    for piece in windows_of(ids, window, stride):
        assert 1 <= piece.first < len(piece.ids) <= window
        assert list(piece.ids) == list(range(piece.ids[0], piece.ids[0] + len(piece.ids)))
        if scored:
            assert piece.first == window - stride  # context
        scored += piece.ids[piece.first :]
    assert scored == ids[1:]


def test_the_loss_of_a_known_distribution() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0]])
    nats, correct = loss_of(logits, torch.tensor([1, 1]))
    assert nats == pytest.approx(math.log(4 / 3) + math.log(4)) and correct == 1


def test_a_text_beside_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Bits per byte over overlapping windows, computed by somebody else's model and tokenizer."""
    file = tmp_path / "story.txt"
    file.write_text(STORY * 3 + "<|endoftext|>\n" + STORY + "<|endoftext|>\n")
    folder = resolve("stories")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = AutoTokenizer.from_pretrained(folder)
    nats, count, hits = 0.0, 0, 0
    for document in (STORY * 3, STORY):
        ids = theirs.encode(document)
        done = 1
        while done < len(ids):
            start = 0 if done == 1 else done - 64
            piece = torch.tensor([ids[start : start + 128]])
            with torch.inference_mode():
                rows = oracle(piece).logits[0, done - start - 1 : -1].log_softmax(-1)
            targets = piece[0, done - start :]
            nats -= float(rows.gather(1, targets[:, None]).sum())
            hits += int((rows.argmax(-1) == targets).sum())
            count += len(targets)
            done = start + piece.shape[1]
    text = read_text(file, tokenizer)
    assert (text.name, len(text.documents)) == ("story.txt", 2)
    score = evaluate(load_runtime(Variant().config(128)), tokenizer, text, 128, 64)
    assert (score.tokens, score.bytes) == (count, len((STORY * 4).encode()))
    assert score.nats == pytest.approx(nats, rel=2e-3)  # bfloat16 beside float32
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(STORY * 4), rel=2e-3)
    assert score.perplexity == pytest.approx(math.exp(nats / count), rel=5e-3)
    assert abs(score.correct - hits) <= 3


def test_drift_of_another_precision(runtime: Runtime, tokenizer: Tokenizer) -> None:
    text = Text("story", [tokenizer.encode(STORY)])
    same = evaluate(runtime, tokenizer, text, 128, 64, against=LocalReader(runtime))
    assert same.drift is not None and (same.drift.kl, same.drift.agreement) == (0.0, 1.0)
    assert same.drift.equal
    with open_reader(Variant(quantization="w4a8"), 128) as other:
        drifted = evaluate(runtime, tokenizer, text, 128, 64, against=other)
    assert drifted.drift is not None and 1e-4 < drifted.drift.kl < 0.2
    assert drifted.drift.reference_perplexity == pytest.approx(drifted.perplexity, rel=1e-4)
    assert drifted.nats == same.nats
    assert drifted.as_dict()["drift"]["kl"] == drifted.drift.kl


def test_logits_that_are_not_numbers_are_refused(tokenizer: Tokenizer) -> None:
    broken = load_runtime(Variant(dtype="float32").config(128))
    with torch.no_grad():
        broken.model.model.norm.parameter("weight")[3] = torch.nan
    words = f"The model gives {VOCAB:,} NaN or infinite logits of {VOCAB:,}"
    with pytest.raises(ModelError, match=words):
        evaluate(broken, tokenizer, Text("story", [tokenizer.encode(STORY)]), 128, 64)


def test_a_run_that_was_kept(tmp_path: Path, runtime: Runtime, tokenizer: Tokenizer) -> None:
    """Its distributions are float16, so a run drifts from itself by next to nothing."""
    texts = [Text("a", [tokenizer.encode(STORY)]), Text("b", [tokenizer.encode("The end. " * 9)])]
    positions = sum(len(ids) - 1 for text in texts for ids in text.documents)
    writer = RunWriter(tmp_path / "run", positions, VOCAB, {"window": 128, "stride": 64})
    for text in texts:
        evaluate(runtime, tokenizer, text, 128, 64, save=writer)
    writer.close()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(about["texts"]) == ["a", "b"] and sum(about["texts"].values()) == positions
    kept = ReferenceRun(tmp_path / "run")
    kept.check(128, 64, VOCAB)
    words = f"window of 128 .* vocabulary of {VOCAB}; this one 64, 32"
    with pytest.raises(ConfigError, match=words):
        kept.check(64, 32, VOCAB)
    for text in texts:
        found = evaluate(runtime, tokenizer, text, 128, 64, reference=kept).drift
        assert found is not None and 0 <= found.kl < 1e-5 and found.agreement > 0.98
    with pytest.raises(ConfigError, match=r"b isn't what the run in .* the texts a, b"):
        evaluate(runtime, tokenizer, texts[1], 128, 64, reference=ReferenceRun(tmp_path / "run"))
    with pytest.raises(ConfigError, match="isn't empty"):
        RunWriter(tmp_path / "run", 1, 2, {})


@pytest.mark.parametrize("spoil", ["missing", "format", "json"])
def test_what_is_not_a_run(tmp_path: Path, spoil: str) -> None:
    np.save(tmp_path / "targets.npy", np.zeros(1))
    if spoil != "missing":
        np.save(tmp_path / "logprobs.npy", np.zeros((1, 2)))
    text = "{" if spoil == "json" else json.dumps({"format": "other" if spoil == "format" else "x"})
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"isn't a complete run|of format 'other'"):
        ReferenceRun(tmp_path)


def test_texts_that_cannot_be_scored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="isn't UTF-8"):
        read_text(file, tokenizer)
    file.write_text("<|endoftext|>\n\n")
    with pytest.raises(ConfigError, match="holds no text"):
        read_text(file, tokenizer)
    file.write_text("aé" * 50 + "<|endoftext|>more")
    (ids,) = read_text(file, tokenizer, max_bytes=5).documents
    assert tokenizer.decode(ids) == "aéa"  # never half a character


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 0), (8, 9)])
def test_wrong_windows(runtime: Runtime, tokenizer: Tokenizer, window: int, stride: int) -> None:
    with pytest.raises(ConfigError, match=f"window of {window} tokens with a stride of {stride}"):
        evaluate(runtime, tokenizer, Text("x", [[1, 2, 3]]), window, stride)

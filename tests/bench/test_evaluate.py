"""`penstock eval` on texts: windows, losses beside transformers', drift, and runs that are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.stories import VOCAB
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.bench.drift import DriftSum
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
    score = evaluate(load_runtime(Variant().config(128)), text, 128, 64)
    assert (score.tokens, score.bytes) == (count, len((STORY * 4).encode()))
    assert score.nats == pytest.approx(nats, rel=2e-3)  # bfloat16 beside float32
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(STORY * 4), rel=2e-3)
    assert score.perplexity == pytest.approx(math.exp(nats / count), rel=5e-3)
    assert abs(score.correct - hits) <= 3


def test_drift_of_another_precision(runtime: Runtime, tokenizer: Tokenizer) -> None:
    text = Text("story", [tokenizer.encode(STORY)])
    same = evaluate(runtime, text, 128, 64, against=LocalReader(runtime))
    assert same.drift is not None and (same.drift.kl, same.drift.agreement) == (0.0, 1.0)
    assert same.drift.equal
    with open_reader(Variant(quantization="w4a8"), 128) as other:
        drifted = evaluate(runtime, text, 128, 64, against=other)
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
        evaluate(broken, Text("story", [tokenizer.encode(STORY)]), 128, 64)


def test_a_run_that_was_kept(tmp_path: Path, runtime: Runtime, tokenizer: Tokenizer) -> None:
    """Its distributions are float16, so a run drifts from itself by next to nothing."""
    texts = [Text("a", [tokenizer.encode(STORY)]), Text("b", [tokenizer.encode("The end. " * 9)])]
    positions = sum(len(ids) - 1 for text in texts for ids in text.documents)
    writer = RunWriter(tmp_path / "run", positions, VOCAB, {"window": 128, "stride": 64})
    for text in texts:
        evaluate(runtime, text, 128, 64, save=writer)
    writer.close()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(about["texts"]) == ["a", "b"] and sum(about["texts"].values()) == positions
    kept = ReferenceRun(tmp_path / "run")
    kept.check(128, 64, VOCAB)
    words = f"window of 128 .* vocabulary of {VOCAB}; this one 64, 32"
    with pytest.raises(ConfigError, match=words):
        kept.check(64, 32, VOCAB)
    for text in texts:
        found = evaluate(runtime, text, 128, 64, reference=kept).drift
        assert found is not None and 0 <= found.kl < 1e-5 and found.agreement == 1.0
    with pytest.raises(ConfigError, match=r"b isn't what the run in .* the texts a, b"):
        evaluate(runtime, texts[1], 128, 64, reference=ReferenceRun(tmp_path / "run"))
    with pytest.raises(ConfigError, match="isn't empty"):
        RunWriter(tmp_path / "run", 1, 2, {})


@pytest.mark.parametrize("older", [False, True])
def test_rounding_takes_no_agreement_away(tmp_path: Path, older: bool) -> None:
    """In float16 two tokens of nearly one probability are equal, and the first would be it."""
    logits = torch.tensor([[0.0, 1e-5, -9.0], [1e-5, 0.0, -9.0], [0.0, 1e-5, -9.0]])
    other = torch.tensor([[0.0, 1e-5, -9.0], [1e-5, 0.0, -9.0], [-9.0, 0.0, 1e-5]])
    targets = torch.tensor([0, 1, 2])
    writer = RunWriter(tmp_path / "run", 3, 3, {"window": 8, "stride": 4})
    writer.add("a", logits, targets)
    writer.close()
    if older:
        (tmp_path / "run" / "likeliest.npy").unlink()
    for read, agreement in ((logits, 1.0), (other, 2 / 3)):
        was = ReferenceRun(tmp_path / "run").next("a", targets)
        assert int((was.logprobs.argmax(-1) == logits.argmax(-1)).sum()) == 1
        drift = DriftSum()
        drift.add(was.logprobs, read, targets, likeliest=was.likeliest_beside(read))
        assert drift.result().agreement == pytest.approx(agreement)


@pytest.mark.parametrize(
    ("about", "rows", "words"),
    [
        ("{", 1, "isn't a complete run"),
        ("[" * 100_000, 1, "nested too deeply"),
        ("[]", 1, "isn't an object"),
        ('{"format": "penstock-run-1", "texts": 3}', 1, "isn't an object that names texts"),
        ('{"format": "other"}', 1, "of format 'other'"),
        ('{"format": "penstock-run-1"}', None, "isn't a complete run"),
        ('{"format": "penstock-run-1"}', 2, r"logprobs.npy has shape \(2, 2\), targets.npy \(1,\)"),
    ],
)
def test_what_is_not_a_run(tmp_path: Path, about: str, rows: int | None, words: str) -> None:
    np.save(tmp_path / "targets.npy", np.zeros(1))
    if rows is not None:
        np.save(tmp_path / "logprobs.npy", np.zeros((rows, 2)))
    (tmp_path / "run.json").write_text(about)
    with pytest.raises(ConfigError, match=words):
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


@pytest.fixture(scope="module")
def prepending(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Tokenizer]:
    """Made as SentencePiece's are: a space before the text, bytes for what it doesn't know."""
    letters = {c: i for i, c in enumerate("▁cateh", 259)}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {**letters, "▁c": 270, "▁ca": 271, "▁cat": 272}
    merges = [["▁", "c"], ["▁c", "a"], ["▁ca", "t"]]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True,
             "unk_token": "<unk>", "fuse_unk": True}  # fmt: skip
    spaces = [{"type": "Prepend", "prepend": "▁"},
              {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]  # fmt: skip
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    added = [{"id": i, "content": name, "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}
             for i, name in enumerate(("<unk>", "<s>", "</s>"))]  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
             "normalizer": {"type": "Sequence", "normalizers": spaces}, "pre_tokenizer": None,
             "post_processor": None, "model": model,
             "decoder": {"type": "Sequence", "decoders": back}}  # fmt: skip

    def load(begins: bool) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
                    "unk_token": "<unk>", "add_bos_token": begins}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer.from_folder(folder)

    return load


@pytest.mark.parametrize("document", ["cat", "the cat", "é 你", "hi </s> cat", " cat"])
@pytest.mark.parametrize("begins", [True, False])
def test_bytes_are_the_texts_own(
    tmp_path: Path, prepending: Callable[[bool], Tokenizer], document: str, begins: bool
) -> None:
    """Whatever spaces a tokenizer adds; without a BOS the first token's aren't scored."""
    tokenizer, file = prepending(begins), tmp_path / "text.txt"
    file.write_text(f"{document}\n<|endoftext|>cat cat")
    ids = tokenizer.encode(document)
    sizes = [len(document.encode()), len("cat cat")]
    if not begins:
        first = tokenizer.decode(ids[:1])  # which drops a space that was put before
        sizes = [sizes[0] - len(first.encode()), sizes[1] - 3]
    text = read_text(file, tokenizer)
    if len(ids) == 1:  # nothing to score
        sizes = sizes[1:]
    assert text.sizes == sizes and len(text.documents) == len(sizes)


def test_special_tokens_that_a_text_spells_out_are_bytes_of_it(
    tmp_path: Path, runtime: Runtime, tokenizer: Tokenizer
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("<|im_start|>user\nA frog.<|im_end|>\n" + STORY)
    score = evaluate(runtime, read_text(file, tokenizer), 128, 64)
    assert score.bytes == len(file.read_bytes())
    cut = read_text(file, tokenizer, max_bytes=50)
    assert evaluate(runtime, cut, 16, 8).bytes == 50


def test_a_text_without_bytes_has_no_bits_per_byte(runtime: Runtime) -> None:
    score = evaluate(runtime, Text("x", [[1, 2, 3]]), 8, 4)
    assert score.bytes == 0 and score.as_dict()["bits_per_byte"] is None


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 0), (8, 9)])
def test_wrong_windows(runtime: Runtime, tokenizer: Tokenizer, window: int, stride: int) -> None:
    with pytest.raises(ConfigError, match=f"window of {window} tokens with a stride of {stride}"):
        evaluate(runtime, Text("x", [[1, 2, 3]]), window, stride)

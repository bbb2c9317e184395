import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipes.batches import PackedExamples, Windows
from recipes.corpus import Corpus
from recipes.evaluate import Figure, agreement, evaluate, score_adapter
from recipes.family import (
    FINETUNE,
    adapt,
    device_of,
    finetune,
    held_out_batches,
    held_out_replies,
    read_model,
    sources,
)
from recipes.lora import LoraConfig
from recipes.model import SHAPES, Llama, load, save_model
from recipes.prepare import prepare
from recipes.replies import REPLY
from recipes.train import TrainConfig
from torch.nn import functional as F

from penstock.errors import ConfigError

SHAPE = replace(SHAPES["tiny"], vocab_size=512, context=256)


@pytest.fixture(scope="module")
def work(made_up_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs, and an untrained base and chat."""
    folder = tmp_path_factory.mktemp("work")
    prepare(made_up_data, folder, vocab_size=512)
    tokenizer = Corpus(folder).text("tokenizer.json")
    for seed, name in enumerate(("base", "chat")):
        model = Llama(SHAPE).initialise(seed)
        save_model(model.state_dict(), SHAPE, tokenizer, folder / name, chat=name == "chat")
    return folder


def test_a_limit_is_met_or_not() -> None:
    assert Figure("m", "f", 0.7, 0.75, at_most=True).passed is True
    assert Figure("m", "f", 0.8, 0.75, at_most=True).passed is False
    assert Figure("m", "f", 0.6, 0.6).passed is True
    assert Figure("m", "f", 0.1).passed is None
    assert Figure("m", "f", 0.8, 0.75, at_most=True).line().endswith("| ≤ 0.75 | **no** |")


def test_a_model_agrees_with_itself_and_not_with_its_opposite(work: Path, tmp_path: Path) -> None:
    corpus = Corpus(work)
    assert agreement(corpus, work / "chat", work / "chat", 3) == 1.0
    state = load(work / "chat").state_dict()
    state["model.norm.weight"] *= -1.0
    save_model(state, SHAPE, corpus.text("tokenizer.json"), tmp_path, chat=True)
    assert agreement(corpus, tmp_path, work / "chat", 3) == 0.0


def test_held_out_rows_are_the_text_they_come_from(work: Path) -> None:
    from tokenizers import Tokenizer

    corpus = Corpus(work)
    batch = held_out_batches(corpus, ("tinystories",), 64)["tinystories"]
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    first = corpus.text("held_out/tinystories.txt").split("<|endoftext|>")[0].strip("\n")
    ids = tokenizer.encode(first).ids
    assert batch.tokens[0].tolist() == ids[:65]
    assert batch.weights.min() == 1.0


def test_held_out_conversations_count_by_their_replies_alone(work: Path) -> None:
    from tokenizers import Tokenizer

    corpus = Corpus(work)
    batch = held_out_replies(corpus, ("dialogues",), 256)["dialogues"]
    tokenizer = Tokenizer.from_str(corpus.text("tokenizer.json"))
    text = corpus.text("held_out/dialogues.txt")
    said = [tokenizer.encode(s, add_special_tokens=False).ids for s in REPLY.findall(text)]
    for tokens, weights in zip(batch.tokens[:, 1:], batch.weights, strict=True):
        counted = tokens[weights == 1.0].tolist()
        assert len(counted) == weights.sum() > 0
        while counted:  # reply after reply, whole
            reply = next(ids for ids in said if counted[: len(ids)] == ids)
            counted = counted[len(reply) :]


def test_the_chat_model_is_what_was_trained(work: Path, tmp_path: Path) -> None:
    for name in ("base", "pretrain.zip", "finetune.zip"):
        (tmp_path / name).symlink_to(work / name)
    config = TrainConfig(steps=12, rows=4, micro_rows=4, learning_rate=2e-3)
    finetune(tmp_path, config, 0.0, device_of("cpu"))
    log = (tmp_path / "chat" / "log.jsonl").read_text()
    history = [json.loads(line) for line in log.splitlines()]
    assert history[-1]["dialogues"] < history[0]["dialogues"]
    base, chat = (load(tmp_path / name).state_dict() for name in ("base", "chat"))
    assert all(not base[name].equal(weight) for name, weight in chat.items())


def test_only_replies_count_in_fine_tuning(work: Path) -> None:
    rows = sources(Corpus(work), FINETUNE, 256, replies=True)
    assert isinstance(rows["tinystories"], Windows)
    assert isinstance(rows["tools"], PackedExamples)
    _, weights, _ = rows["tools"].row(0, 0.0)
    assert 0 < weights.mean() < 0.9
    everything = sources(Corpus(work), FINETUNE, 256, replies=False)["tools"]
    assert everything.row(0, 0.0)[1].sum() > weights.sum()


def test_the_adapter_is_scored_by_what_it_changes(work: Path, tmp_path: Path) -> None:
    config = TrainConfig(steps=6, rows=2, micro_rows=2, learning_rate=2e-2, muon=False)
    adapt(work, "shakespeare", config, LoraConfig(4, 8), device_of("cpu"))
    file = Corpus(work).held_out(tmp_path)["shakespeare.txt"]
    before, after, gain = (f.value for f in score_adapter(work, "shakespeare", file, 2000))
    assert after < before
    assert gain == pytest.approx(1 - after / before)
    # the same by hand, window for window, in float32 and without the engine
    model = load(work / "base")
    batch = held_out_batches(Corpus(work), ("shakespeare",), 255)["shakespeare"]
    with torch.no_grad():
        logits = model(batch.tokens[:, :-1]).flatten(0, 1)
    nats = F.cross_entropy(logits, batch.tokens[:, 1:].flatten())
    assert before == pytest.approx(float(nats.exp()), rel=0.05)


def test_evaluate_scores_what_there_is(work: Path, tmp_path: Path) -> None:
    for name in ("pretrain.zip", "finetune.zip"):
        shutil.copyfile(work / name, tmp_path / name)
    table = evaluate(tmp_path, 1000, 1, compare=None)
    assert table.count("\n") == 1  # the head alone


def test_what_is_missing_is_named(tmp_path: Path, work: Path) -> None:
    with pytest.raises(ConfigError, match="train `base` first"):
        read_model(tmp_path, "base", 0.0, torch.device("cpu"))
    with pytest.raises(ConfigError, match="no style 'haiku'"):
        adapt(work, "haiku", TrainConfig(steps=1), LoraConfig(), torch.device("cpu"))

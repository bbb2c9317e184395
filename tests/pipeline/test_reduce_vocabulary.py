"""Reduced vocabularies: the same logits at the tokens that stay, the tokenizer's ids outside."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock import LLM, SamplingParams
from penstock.bench.drift import measure_drift
from penstock.bench.reader import open_reader, window_step
from penstock.bench.texts import Text
from penstock.bench.variant import Variant
from penstock.bench.vocabularies import encode_for_both
from penstock.engine import Engine
from penstock.errors import (
    ConfigError,
    EngineFolderError,
    InvalidPromptError,
    InvalidSamplingError,
    PenstockError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from penstock.kernels import native
from penstock.pipeline import vocabulary as module
from penstock.pipeline.vocabulary import read_keep_list, reduce_vocabulary
from penstock.runtime import Runtime, load_runtime
from penstock.tokenizer import Tokenizer
from tests.models.stories import HIDDEN, POSITIONS, STORIES, VOCAB

ALWAYS = 256 + len(json.loads((STORIES / "tokenizer.json").read_text())["added_tokens"])
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her "
    "dog, Max. One day, Lily and Max saw a big red ball under a tree. Lily wanted to play with it. "
)
STRANGE = "The extraordinary hippopotamus whispered: «Zażółć gęślą jaźń» 🦛."
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model (tied, byte-level BPE) with 700 of its tokens."""
    folder = tmp_path_factory.mktemp("reduced") / "stories"
    reduce_vocabulary("stories", folder, size=700, texts=[STORY])
    return folder


@pytest.fixture(scope="module")
def whole() -> LLM:
    return LLM("stories", max_num_seqs=2)


@pytest.fixture(scope="module")
def small(reduced: Path) -> LLM:
    return LLM(reduced, max_num_seqs=2)


def logits_of(runtime: Runtime, ids: list[int]) -> Tensor:
    return runtime.runner.forward(window_step(runtime, ids, 1)).clone()


@pytest.mark.parametrize("form", [{}, {"dtype": "float32"}, {"quantization": "w4a8"}])
@pytest.mark.parametrize("eager", [False, True])
def test_logits_of_kept_tokens_are_the_same(
    reduced: Path, form: dict[str, Any], eager: bool
) -> None:
    full, less = (
        load_runtime(Variant(model, eager=eager, **form).config(64))
        for model in ("stories", reduced)
    )
    assert full.tokenizer is not None and less.vocab_map is not None
    ids = less.tokenizer.encode(STORY)[:40]  # type: ignore[union-attr]
    assert ids == full.tokenizer.encode(STORY)[:40]
    want, got = logits_of(full, ids), logits_of(less, ids)
    kept = torch.from_numpy(less.vocab_map.kept).long()
    assert got.shape == want.shape == (39, VOCAB) and len(kept) == 700
    assert torch.equal(got[:, kept], want[:, kept])
    rest = torch.ones(VOCAB, dtype=torch.bool)
    rest[kept] = False
    assert torch.equal(got[:, rest], torch.full((39, VOCAB - 700), -torch.inf))


def test_the_checkpoint_is_a_smaller_one_of_its_family(reduced: Path) -> None:
    """transformers reads it, in the ids of its rows, and finds the whole model's logits there."""
    found = VocabIds(reduced)
    rows = found.rows(Tokenizer.from_folder(STORIES).encode(STORY)[:30])
    mine, theirs = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
        for f in (reduced, STORIES)
    )
    with torch.inference_mode():
        got = mine(torch.tensor([rows])).logits[0]
        want = theirs(torch.tensor([found.ids(rows)])).logits[0]
    assert got.shape == (30, 700)
    assert torch.allclose(got, want[:, found.kept], atol=1e-4)
    config = json.loads((reduced / "config.json").read_text())
    assert config["vocab_size"] == 700 and found.kept[config["eos_token_id"]] == 0
    size = sum(t.nbytes for t in load_file(reduced / "model.safetensors").values())
    whole = sum(t.nbytes for t in load_file(STORIES / "model.safetensors").values())
    assert whole - size == (VOCAB - 700) * HIDDEN * 2


class VocabIds:
    """A map as the file has it, read by another library's means."""

    def __init__(self, folder: Path) -> None:
        self.kept = load_file(folder / "vocab_map.safetensors")["kept"].long()

    def rows(self, ids: list[int]) -> list[int]:
        where = {int(i): row for row, i in enumerate(self.kept)}
        return [where[i] for i in ids]

    def ids(self, rows: list[int]) -> list[int]:
        return [int(self.kept[row]) for row in rows]


def test_greedy_text_is_the_same_where_no_dropped_token_is_chosen(
    whole: LLM, tmp_path: Path
) -> None:
    prompts = ["Once upon a time", "The boy and the frog", STORY]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    want = whole.generate(prompts, params)
    used = {i for o in want for i in (*o.prompt_token_ids, *o.outputs[0].token_ids)}
    found = reduce_vocabulary("stories", tmp_path / "used", keep=sorted(used))
    assert len(found.vocab_map) < 900
    llm = LLM(tmp_path / "used", max_num_seqs=2)
    for one, other in zip(want, llm.generate(prompts, params), strict=True):
        assert other.prompt_token_ids == one.prompt_token_ids
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        assert other.outputs[0].text == one.outputs[0].text
        assert other.outputs[0].finish_reason == one.outputs[0].finish_reason
        for entry, before in zip(
            other.outputs[0].logprobs or [], one.outputs[0].logprobs or [], strict=True
        ):
            token = next(iter(before))
            assert entry[token].decoded_token == before[token].decoded_token
            assert entry[token].rank == 1 == before[token].rank
            assert entry[token].logprob >= before[token].logprob - 1e-5  # others are gone


def test_it_ends_at_the_same_end_token(small: LLM, whole: LLM) -> None:
    """All end tokens stay, by their own ids."""
    assert small.runtime.model.eos_token_ids == whole.runtime.model.eos_token_ids
    params = SamplingParams(temperature=0.0, max_tokens=2, logit_bias={0: 100.0})
    (done,) = small.generate("Once upon a time", params)
    assert done.outputs[0].token_ids == [0] and done.outputs[0].finish_reason == "stop"


def test_any_text_is_written_in_kept_tokens(small: LLM, whole: LLM) -> None:
    tokenizer, full = small.get_tokenizer(), whole.get_tokenizer()
    found = small.runtime.vocab_map
    assert found is not None
    for text in (STORY, STRANGE, "\x00\t\r\n", "<|im_start|>user\nHi<|im_end|>"):
        ids = tokenizer.encode(text)
        assert all(map(found.has, ids))
        assert tokenizer.decode(ids) == full.decode(full.encode(text))
        (out,) = small.generate([{"prompt_token_ids": full.encode(text)}], GREEDY)
        assert out.prompt_token_ids == ids  # ids of the whole vocabulary are written so, too
        assert all(map(found.has, out.outputs[0].token_ids))
    assert len(tokenizer.encode(STRANGE)) > len(full.encode(STRANGE))
    assert tokenizer.encode(STORY) == full.encode(STORY)


def test_the_length_that_counts_is_the_written_one(small: LLM) -> None:
    found = small.runtime.vocab_map
    assert found is not None
    size, count = len(found.write([dropped(small)])), POSITIONS // 2
    assert size > 1
    words = rf"has {count * size} tokens, .* only {POSITIONS - 1} fit"
    with pytest.raises(InvalidPromptError, match=words):
        small.generate([{"prompt_token_ids": [dropped(small)] * count}], GREEDY)


def dropped(llm: LLM) -> int:
    found = llm.runtime.vocab_map
    assert found is not None
    return next(i for i in range(2000, VOCAB) if not found.has(i))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_tokens_that_can_never_come_are_refused(small: LLM, name: str) -> None:
    token = dropped(small)
    text = small.get_tokenizer().decode([token])
    asked: Any = {token: 1.0} if name == "logit_bias" else [1, token]
    with pytest.raises(InvalidSamplingError) as caught:
        small.generate("Once", SamplingParams(**{name: asked}))
    assert f"{name} holds token id {token} ({text!r})" in str(caught.value)
    assert f"among the 700 of {VOCAB:,}" in str(caught.value)
    kept: Any = {262: 1.0} if name == "logit_bias" else [262]
    small.generate("Once", SamplingParams(max_tokens=2, **{name: kept}))
    beyond: Any = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
    with pytest.raises(InvalidSamplingError, match=str(VOCAB)):  # outside the whole vocabulary
        small.generate("Once", SamplingParams(**{name: beyond}))


def test_public_ids_are_the_tokenizers(small: LLM) -> None:
    """Stops, biases, bans, penalties and log-probabilities name original ids."""
    assert small.engine.vocab_size == VOCAB
    (plain,) = small.generate("Once upon a time", GREEDY)
    tokens = plain.outputs[0].token_ids
    (stopped,) = small.generate(
        "Once upon a time",
        SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[tokens[3]]),
    )
    assert stopped.outputs[0].token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.outputs[0].stop_reason == tokens[3]
    params = SamplingParams(
        temperature=0.0, max_tokens=4, allowed_token_ids=[tokens[5], tokens[6]], logprobs=1
    )
    (allowed,) = small.generate("Once upon a time", params)
    assert set(allowed.outputs[0].token_ids) <= {tokens[5], tokens[6]}
    word = small.get_tokenizer().decode(tokens[:1]).strip()
    banned = SamplingParams(temperature=0.0, max_tokens=4, bad_words=[word], repetition_penalty=1.3)
    (without,) = small.generate("Once upon a time", banned)
    assert without.outputs[0].token_ids[0] != tokens[0]


def test_every_log_probability_is_of_a_kept_token(small: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    (out,) = small.generate("Once upon a time", params)
    found = small.runtime.vocab_map
    assert found is not None and out.outputs[0].logprobs and out.prompt_logprobs
    for entry in (out.outputs[0].logprobs[0], *out.prompt_logprobs[1:]):
        assert entry is not None and set(entry) == set(found.kept.tolist())
        assert math.fsum(math.exp(one.logprob) for one in entry.values()) == pytest.approx(1.0)


def test_sampling_never_leaves_the_vocabulary(small: LLM) -> None:
    found = small.runtime.vocab_map
    assert found is not None
    for cuts in ({}, {"top_k": 2 * VOCAB}, {"top_p": 0.99}, {"min_p": 1e-9}):
        params = SamplingParams(temperature=50.0, max_tokens=60, seed=3, ignore_eos=True, **cuts)  # type: ignore[arg-type]
        (out,) = small.generate("Once", params)
        tokens = out.outputs[0].token_ids
        assert all(map(found.has, tokens)) and len(set(tokens)) > 20


def test_embeddings_are_the_same(small: LLM, whole: LLM) -> None:
    (one,), (other,) = small.embed([STORY]), whole.embed([STORY])
    assert one.outputs.embedding == other.outputs.embedding


def test_without_a_tokenizer_ids_are_enough(reduced: Path, small: LLM) -> None:
    token = dropped(small)
    bare = load_runtime(Variant(reduced).config(64))
    engine = Engine(Variant(reduced).config(64), bare)
    assert engine.intake.checked([token]) == small.runtime.vocab_map.write([token])  # type: ignore[union-attr]


def test_ids_that_no_token_can_stand_for(tmp_path: Path) -> None:
    """Rows that pad an embedding have no text."""
    folder = tmp_path / "padded"
    shutil.copytree(STORIES, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], torch.zeros(64, HIDDEN, dtype=weights[name].dtype)])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 64}))
    found = reduce_vocabulary(folder, tmp_path / "out", size=VOCAB + 4, texts=[STORY])
    assert len(found.vocab_map) == VOCAB and len(found.fallen) == 64  # nothing to fill it with
    llm = LLM(tmp_path / "out", max_num_seqs=1)
    words = rf"Token id {VOCAB + 4} \(''\) isn't among the {VOCAB:,}"
    with pytest.raises(InvalidPromptError, match=words):
        llm.generate([{"prompt_token_ids": [5, VOCAB + 4]}], GREEDY)


# ── other models ─────────────────────────────────────────────────────────────────────────────


def fallback_model(folder: Path, tied: bool) -> Path:
    """A tiny Llama with a SentencePiece-like BPE: characters, merges, and bytes."""
    letters = [chr(i) for i in range(97, 123)]
    pairs = [(a, b) for a in letters[:10] for b in letters[:10]]
    words = [("▁", a) for a in letters]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    pieces += [a + b for a, b in [*pairs, *words]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = Library(
        models.BPE(vocab, [*pairs, *words], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(pieces) + 5,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_byte_fallback_untied_and_in_shards(tmp_path: Path, tied: bool) -> None:
    source, output = fallback_model(tmp_path / "m", tied), tmp_path / "out"
    assert (source / "model.safetensors.index.json").exists()
    found = reduce_vocabulary(source, output, keep=["abba bad", 300])
    assert found.share is None and len(found.vocab_map) < 290
    full, less = (load_runtime(Variant(f).config(64)) for f in (source, output))
    assert full.tokenizer is not None and less.tokenizer is not None and less.vocab_map is not None
    for text in ("abba bad", "zebra crossing — ñandú"):
        ids = less.tokenizer.encode(text)
        assert all(map(less.vocab_map.has, ids))
        again = full.tokenizer.decode(full.tokenizer.encode(text))
        assert less.tokenizer.decode(ids) == text == again
        kept = torch.from_numpy(less.vocab_map.kept).long()
        assert torch.equal(logits_of(less, ids)[:, kept], logits_of(full, ids)[:, kept])
    assert less.tokenizer.encode("abba bad") == full.tokenizer.encode("abba bad")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors = {
        n: t for f in set(index["weight_map"].values()) for n, t in load_file(output / f).items()
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert ("lm_head.weight" in tensors) != tied


# ── choosing ─────────────────────────────────────────────────────────────────────────────────


def test_the_most_frequent_stay_with_their_parts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(STORIES)
    found = reduce_vocabulary("stories", tmp_path / "out", size=320, texts=[STORY * 3, "Max Max"])
    kept = set(found.vocab_map.kept.tolist())
    assert len(kept) <= 320 and {0, 1, 2} <= kept and found.always == ALWAYS
    bpe = tokenizer.bpe()
    assert all(bpe.closure(token) <= kept for token in kept)
    assert found.share is not None and 0.3 < found.share < 1.0
    report = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert report["kept_tokens"] == len(kept) and report["original_tokens"] == VOCAB
    assert {one["id"] for one in report["unreachable"]} == set(range(VOCAB)) - kept
    assert all(one["text"] == tokenizer.decode([one["id"]]) for one in report["unreachable"])


def test_lists_of_tokens(tmp_path: Path) -> None:
    lines, other = tmp_path / "keep.txt", tmp_path / "keep.json"
    lines.write_text("300\nLily\n\n")
    other.write_text('[300, "Lily"]')
    assert read_keep_list(lines) == read_keep_list(other) == [300, "Lily"]
    found = reduce_vocabulary("stories", tmp_path / "out", keep=read_keep_list(lines))
    tokenizer = Tokenizer.from_folder(STORIES)
    for form in ("Lily", " Lily"):
        assert all(map(found.vocab_map.has, tokenizer.encode(form)))
    assert found.vocab_map.has(300)
    for text in ("{", "[]", "[1.5]", '{"a": 1}', "[true]"):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"list of token"):
            read_keep_list(other)
    for file, text in ((other, "[" * 100_000), (other, f"[{'9' * 5000}]"), (lines, "9" * 5000)):
        file.write_text(text)
        with pytest.raises(ConfigError, match="isn't a list of tokens"):
            read_keep_list(file)


Change = Callable[[Path], None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 100, "texts": [STORY]}, f"{ALWAYS} always stay"),
        ({"size": VOCAB + 904, "texts": [STORY]}, f"the model has {VOCAB:,}"),
        ({"size": 500}, "hold no token to count"),
        ({"size": 500, "texts": ["", ""]}, "2 texts hold no token"),
        ({}, "Say how many tokens"),
        ({"keep": [5], "size": 500}, "not both"),
        ({"keep": [VOCAB]}, f"ids go from 0 to {VOCAB - 1:,}"),
        ({"keep": [-1]}, "token id -1"),
    ],
)
def test_sizes_and_lists_that_cannot_be(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        reduce_vocabulary("stories", tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_cannot_be_reduced(tmp_path: Path, reduced: Path) -> None:
    def refused(folder: Path, kind: type[PenstockError], words: str) -> None:
        with pytest.raises(kind, match=words):
            reduce_vocabulary(folder, tmp_path / "out", size=600, texts=[STORY])
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()

    refused(reduced, ConfigError, "has a reduced vocabulary already")
    copy = tmp_path / "copy"
    shutil.copytree(STORIES, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    refused(copy, UnsupportedModelError, "Reduce the vocabulary of the model before quantizing")
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 104}))
    words = rf"has shape \[{VOCAB}, {HIDDEN}\], but the vocabulary {VOCAB + 104:,} tokens"
    refused(copy, WeightsError, words)
    (copy / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Fuse"}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(copy, TokenizerError, "BPE over characters")


def test_nothing_is_left_of_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out"
    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(EngineFolderError, match="The disk filled up"):
        reduce_vocabulary("stories", output, size=600, texts=[STORY])
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "out.partial").mkdir()  # of a process that was killed
    (tmp_path / "out.partial" / "old").touch()
    reduce_vocabulary("stories", output, size=600, texts=[STORY])
    assert not (output / "old").exists()
    with pytest.raises(ConfigError, match="exists already"):
        reduce_vocabulary("stories", output, size=600, texts=[STORY])


def test_a_map_of_another_model(tmp_path: Path, reduced: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(STORIES, copy)
    shutil.copy(reduced / "vocab_map.safetensors", copy)
    words = f"{VOCAB:,} tokens, but its vocab_map.safetensors names 700"
    with pytest.raises(WeightsError, match=words):
        load_runtime(Variant(copy).config(64))


@pytest.mark.parametrize("words", ["", "eager", "graph", "isa=avx2"])
def test_drift_of_nothing_but_the_tokens_left_out(reduced: Path, words: str) -> None:
    """KL is 0 by ==; perplexity falls by the probability of what was left out, and by no more."""
    if native.handle is None and "isa" in words:
        pytest.skip(f"no native kernels: {native.reason}")
    with (
        open_reader(Variant(), 128) as a,
        open_reader(Variant(reduced).with_options(words), 128) as b,
    ):
        encoded, remark = encode_for_both("x", [STRANGE], a, b, ("A", "B"))
        assert "instead of" in remark
        found = measure_drift(a, b, [Text("x", encoded)], 128, 64, worst=3, layers=True)
        logits = a.read(encoded[0], 1).logits.double()
        kept = b.kept()
    assert kept is not None and len(kept) == 700
    assert found.equal and found.kl == found.kl_max == 0 and found.worst == ()
    assert all(layer.largest == 0 for layer in found.layers)
    assert found.shared_tokens == 700 and found.outside is not None
    one, other = found.outside
    assert (one.tokens, other.tokens) == (VOCAB - 700, 0) and other.largest == 0
    assert found.positions == len(logits)
    inside = logits.softmax(-1)[:, kept].sum(-1)
    assert one.mean == pytest.approx(float((1 - inside).mean()), rel=1e-6)
    ratio = found.perplexity / found.reference_perplexity
    assert ratio == pytest.approx(float(inside.log().mean().exp()), rel=1e-6)
    assert 0 < one.mean < one.largest < 1


def test_two_that_are_reduced_alike(reduced: Path) -> None:
    with (
        open_reader(Variant(reduced), 64) as a,
        open_reader(Variant(reduced, quantization="w8a8"), 64) as b,
    ):
        encoded, _ = encode_for_both("x", [STRANGE], a, b, ("A", "B"))
        found = measure_drift(a, b, [Text("x", encoded)], 64, 32, layers=True)
    assert 0 < found.kl < 0.01 and found.outside is not None
    assert [x.tokens for x in found.outside] == [0, 0]

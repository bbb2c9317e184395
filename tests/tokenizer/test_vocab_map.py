"""The map of a reduced vocabulary, and the merges that write a text without some tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import models

from penstock.errors import InvalidPromptError, TokenizerError, WeightsError
from penstock.models.hub import resolve
from penstock.tokenizer import Tokenizer, VocabMap
from penstock.tokenizer.bpe import Bpe
from penstock.tokenizer.pieces import byte_alphabet
from penstock.tokenizer.vocab_map import FILE


@pytest.fixture(scope="module")
def stories() -> Tokenizer:
    return Tokenizer.from_folder(resolve("stories"))


def test_ids_that_are_not_kept_are_written_in_others(tmp_path: Path) -> None:
    VocabMap.of(6, [4, 0, 2], {1: (2, 0), 3: (4,)}).save(tmp_path)
    found = VocabMap.load(tmp_path)
    assert found is not None
    assert (len(found), found.original_size, found.kept.tolist()) == (3, 6, [0, 2, 4])
    assert found.new.tolist() == [0, -1, 1, -1, 2, -1]
    assert found.write([0, 1, 3, 4]) == [0, 2, 0, 4, 4]
    assert found.write([]) == [] and found.write([4, 2]) == [4, 2]
    assert found.original([0, 2, 3, -1]) == (0, 4)
    assert [found.has(i) for i in range(-1, 7)] == [False, True, False, True, False, True] + [
        False
    ] * 2
    with pytest.raises(InvalidPromptError, match=r"Token id 5 \(five\) isn't among the 3 of 6"):
        found.write([0, 5], lambda i: " (five)")
    assert VocabMap.load(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    "spoil",
    [
        {"kept": [2, 0]},
        {"kept": [0, 9]},
        {"kept": []},
        {"start": [0, 1, 2, 2]},
        {"start": [0, 2, 1, 1]},
        {"rewritten": [1]},
        {"rewritten": [7]},
        {"rewritten": None},
    ],
)
def test_what_is_not_a_map(tmp_path: Path, spoil: dict[str, list[int] | None]) -> None:
    VocabMap.of(3, [0], {}).save(tmp_path)
    arrays = load_file(tmp_path / FILE)
    for name, value in spoil.items():
        del arrays[name]
        if value is not None:
            arrays[name] = np.array(value, dtype=np.int32)
    save_file(arrays, tmp_path / FILE)
    with pytest.raises(WeightsError, match="isn't a map of a reduced vocabulary"):
        VocabMap.load(tmp_path)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (np.array(0, dtype=np.int32), r"kept is int32 of \[\]"),
        (np.array([[0]], dtype=np.int32), r"kept is int32 of \[1, 1\]"),
        (np.array([0.0], dtype=np.float32), r"kept is float32 of \[1\]"),
        (np.array([2**32], dtype=np.int64), "kept has ids from 4294967296 to 4294967296"),
        (torch.zeros(1, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_arrays_of_another_kind(tmp_path: Path, kept: Any, said: str) -> None:
    VocabMap.of(3, [0], {}).save(tmp_path)
    arrays = {name: torch.from_numpy(array) for name, array in load_file(tmp_path / FILE).items()}
    arrays["kept"] = kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept)
    safetensors.torch.save_file(arrays, tmp_path / FILE)
    with pytest.raises(WeightsError, match=f"isn't a map of a reduced vocabulary: .*{said}"):
        VocabMap.load(tmp_path)


def test_wider_integers_are_read(tmp_path: Path) -> None:
    VocabMap.of(3, [0, 2], {1: [2]}).save(tmp_path)
    arrays = load_file(tmp_path / FILE)
    save_file({name: array.astype(np.int64) for name, array in arrays.items()}, tmp_path / FILE)
    found = VocabMap.load(tmp_path)
    assert found is not None and found.kept.dtype == np.int32 and found.write([0, 1]) == [0, 2]


def test_a_map_that_was_cut_off(tmp_path: Path) -> None:
    VocabMap.of(3, [0], {}).save(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="Reduce the model again"):
        VocabMap.load(tmp_path)


@pytest.mark.parametrize("step", [2, 3, 17])
def test_rewriting_is_what_the_library_does_with_those_tokens(
    stories: Tokenizer, step: int
) -> None:
    """A BPE of the `tokenizers` library that has only the kept tokens and their merges."""
    bpe = stories.bpe()
    kept: set[int] = {*bpe.byte_ids, *bpe.added}
    for token in range(0, stories.vocab_size, step):
        kept |= bpe.closure(token)
    whole = stories._backend.as_json()["model"]  # type: ignore[attr-defined]
    vocab = {piece: i for piece, i in whole["vocab"].items() if i in kept}
    merges = [(a, b) for a, b in whole["merges"] if {a, b, a + b} <= vocab.keys()]
    theirs = tokenizers.Tokenizer(models.BPE(vocab, merges))
    dropped = [(p, i) for p, i in whole["vocab"].items() if i not in kept]
    assert len(dropped) > 100
    for piece, token in dropped:
        got = bpe.rewrite(token, kept)
        assert got == theirs.encode(piece).ids, piece
        assert b"".join(map(stories.token_bytes, got)) == stories.token_bytes(token)


def test_parts_of_a_token(stories: Tokenizer) -> None:
    bpe = stories.bpe()
    for token in range(300, stories.vocab_size, 97):
        found = bpe.closure(token)
        pieces = {stories.id_to_token(i) for i in found}
        piece = stories.id_to_token(token)
        assert piece is not None and piece in pieces and set(piece) <= pieces


def fallback_vocabulary() -> dict[str, int]:
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *"▁abcd", "ab", "abc", "▁a", "é", "cd"]
    return {piece: i for i, piece in enumerate(pieces)}


def test_bytes_stand_in_for_characters() -> None:
    vocab = fallback_vocabulary()
    merges = [("a", "b"), ("ab", "c"), ("▁", "a"), ("c", "d")]
    bpe = Bpe(vocab, merges, byte_fallback=True)
    kept = {*bpe.byte_ids, vocab["a"], vocab["b"], vocab["ab"]}
    assert bpe.rewrite(vocab["abc"], kept) == [vocab["ab"], vocab["<0x63>"]]
    assert bpe.rewrite(vocab["é"], kept) == [vocab["<0xC3>"], vocab["<0xA9>"]]
    assert bpe.rewrite(vocab["▁a"], kept) == [
        vocab["<0xE2>"], vocab["<0x96>"], vocab["<0x81>"], vocab["a"]
    ]  # fmt: skip
    assert bpe.rewrite(999, kept) is None
    assert bpe.closure(vocab["abc"]) == {vocab[p] for p in ("abc", "ab", "a", "b", "c")}


def test_vocabularies_that_cannot_be_reduced() -> None:
    with pytest.raises(TokenizerError, match="lacks 256 of 256 bytes"):
        Bpe({"a": 0}, [], byte_fallback=True)
    with pytest.raises(TokenizerError, match="lacks 255 of 256 bytes"):
        Bpe({"a": 0}, [], byte_fallback=False)
    alphabet = {c: i for i, c in enumerate(byte_alphabet())}
    level = {"type": "ByteLevel"}
    with pytest.raises(TokenizerError, match="x is Unigram; only byte-level BPE"):
        Bpe.from_json({"model": {"type": "Unigram"}, "decoder": level}, "x")
    bpe = {"type": "BPE", "vocab": alphabet, "merges": []}
    with pytest.raises(TokenizerError, match="x is BPE over characters"):
        Bpe.from_json({"model": bpe, "decoder": None}, "x")
    whole = {"model": bpe, "decoder": {"type": "Sequence", "decoders": [level]}}
    assert Bpe.from_json(whole, "x").byte_ids == list(range(256))

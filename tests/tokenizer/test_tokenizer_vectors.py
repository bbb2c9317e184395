"""Against published vectors: llama.cpp's token ids, and the string llama2.c prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tokenizer import Tokenizer

# phi-3 has vectors too, but its tokenizer is only there as GGUF.
VECTORS = [
    ("gpt-2", "gpt2"),
    ("gpt-2", "gpt2-slow"),
    ("qwen2", "qwen2.5"),
    ("llama-spm", "llama2"),
    ("llama-spm", "llama2-no-legacy"),
    ("llama-bpe", "llama3"),
]


def read_vectors(data: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = data / "tokenizers" / "llama.cpp-vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    assert texts.pop() == ""  # every text is followed by the separator
    lines = Path(f"{stem}.out").read_text().splitlines()
    expected = [[int(word) for word in line.split()] for line in lines]
    return list(zip(texts, expected, strict=True))


@pytest.mark.parametrize(("vectors", "folder"), VECTORS)
def test_encodes_as_llama_cpp(
    vectors: str, folder: str, shared_data: Path, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(folder)
    cases = read_vectors(shared_data, vectors)
    assert len(cases) == 46
    got = {text: tokenizer.encode(text, add_special_tokens=False) for text, _ in cases}
    assert got == dict(cases)


@pytest.mark.parametrize(("vectors", "folder"), VECTORS)
def test_decodes_the_vectors_back(
    vectors: str, folder: str, shared_data: Path, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(folder)
    for text, ids in read_vectors(shared_data, vectors):
        assert tokenizer.decode(ids) == text


def test_llama2c_story_round_trips(
    shared_data: Path, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of("stories260K")
    path = shared_data / "models" / "stories260K" / "expected_greedy_200steps.txt"
    story = path.read_text().rstrip("\n")
    ids = tokenizer.encode(story)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == story

"""Calibration windows: which they are, and what is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.models.hub import resolve
from penstock.pipeline.calibration import (
    CalibrationSet,
    calibration_set,
    documents,
    from_texts,
)
from penstock.pipeline.vocabulary import choose_vocabulary
from penstock.tokenizer import Tokenizer

STORY = "Once upon a time, there was a little girl named Lily. She loved to play in the park. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("stories"))


def test_windows_are_spread_over_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("<|endoftext|>".join([STORY * 5, STORY * 20, STORY * 10]))
    tokens = [t for n in (5, 20, 10) for t in tokenizer.encode((STORY * n).strip())]
    found = calibration_set([file], tokenizer, num_samples=4, window=64)
    starts = [i * (len(tokens) // 64) // 4 for i in range(4)]
    assert found.windows == tuple(tuple(tokens[64 * i : 64 * i + 64]) for i in starts)
    assert (found.name, found.num_tokens, found.longest) == ("text.txt", 256, 64)
    every = calibration_set([file], tokenizer, num_samples=10**6, window=64)
    assert [t for window in every.windows for t in window] == tokens[: len(tokens) // 64 * 64]
    assert every.first(4) == found


def test_a_text_shorter_than_a_window_is_one_window(tokenizer: Tokenizer) -> None:
    found = from_texts([STORY * 20], tokenizer, "short", window=100_000)
    assert found.windows == (tuple(tokenizer.encode((STORY * 20).strip())),)


@pytest.mark.parametrize(("stories", "asked", "told"), [(40, 128, True), (40, 1, False)])
def test_few_windows_are_told_of(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, stories: int, asked: int, told: bool
) -> None:
    """But not where so few were asked for."""
    with caplog.at_level("WARNING", "penstock"):
        from_texts([STORY * stories], tokenizer, "few", num_samples=asked)
    assert ("may be worse than what is rounded to nearest" in caplog.text) is told


def test_windows_of_fewer_tokens_are_as_long(tokenizer: Tokenizer) -> None:
    """In rows of a reduced vocabulary, where a token that was left out is several others."""
    folder = resolve("stories")
    kept = choose_vocabulary(folder, size=500, texts=["The dog ran. The cat sat."]).vocab_map
    found = from_texts([STORY * 20], tokenizer, "few", window=50, num_samples=1000, reduced=kept)
    assert {len(window) for window in found.windows} == {50}
    ids = tokenizer.encode((STORY * 20).strip())
    written = kept.write(ids)
    assert len(written) > len(ids)  # some were left out
    rows = [row for window in found.windows for row in window]
    assert rows == kept.new[written].tolist()[: len(written) // 50 * 50]
    assert max(rows) < len(kept)


def test_a_document_begins_alike_wherever_it_stands() -> None:
    """What is counted for a vocabulary is what a calibration's windows hold."""
    folder = resolve("stories")
    tokenizer = Tokenizer.from_folder(folder)
    texts = ["<|endoftext|>\n".join(["Lily ran. ", " there was a dog", "\n\nOnce. "])]
    needed = {i for text in documents(texts) for i in tokenizer.encode(text)}
    kept = choose_vocabulary(folder, size=1000, texts=texts).vocab_map
    assert all(kept.has(token) for token in needed)


def test_the_hash_is_of_windows_and_tokens() -> None:
    one = CalibrationSet("a", ((1, 2), (3,)))
    assert one.sha256 == CalibrationSet("b", ((1, 2), (3,))).sha256
    others = [((1,), (2, 3)), ((1, 2), (4,)), ((1, 2, 3),)]
    assert len({one.sha256, *(CalibrationSet("a", w).sha256 for w in others)}) == 4


def test_too_little_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for text in ("", "  <|endoftext|>\n", STORY):
        with pytest.raises(ConfigError, match=r"has \d+ tokens, but 256 are the least"):
            from_texts([text], tokenizer, "little")
    with pytest.raises(ConfigError, match="one of two is the least"):
        from_texts([STORY], tokenizer, "none", num_samples=0)
    (tmp_path / "latin").write_bytes("für".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin isn't UTF-8 \(invalid .* at byte 1\)"):
        calibration_set([tmp_path / "latin"], tokenizer)
    with pytest.raises(ConfigError, match="can't be read"):
        calibration_set([tmp_path / "absent"], tokenizer)

"""Documents, rows, batches: what is trained on, what is held out, and in which order."""

import json
from itertools import chain
from pathlib import Path

import pytest
from recipes.speculation.generate import continuations, prompts
from recipes.speculation.target import Target
from recipes.speculation.text import (
    Document,
    Row,
    Rows,
    count_tokens,
    encode,
    fingerprint,
    pad,
    read_documents,
    text_rows,
)

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError


def test_a_text_is_cut_at_its_marks_or_into_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n")
    assert [document.text for document in read_documents(file)] == ["One.", "Two."]
    long = ["x" * 900, "y" * 900, "z" * 100]
    file.write_text("\n\n".join(long))
    assert [document.text for document in read_documents(file)] == [
        "\n\n".join(long[:2]), long[2],
    ]  # fmt: skip


def test_json_lines_may_say_prompts_and_what_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    entries = [{"text": "Hi there"}, {"text": "Ask. Answer.", "prompt": "Ask.", "held_out": True}]
    file.write_text("\n".join(map(json.dumps, entries)))
    first, second = read_documents(file)
    assert first == Document("Hi there")
    assert second == Document("Ask. Answer.", "Ask.", True)
    assert second.is_held_out
    share = sum(Document(f"text {i}").is_held_out for i in range(5000)) / 5000
    assert 0.014 < share < 0.026


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "has no text"),
        ("a.txt", b" \n\n \n", "has no text"),
        ("a.txt", b"\xff\xfe\x00", "isn't text in UTF-8"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            'Line 2 of .* isn\'t an object with a "text"',
        ),
        ("a.jsonl", b'["text"]\n', "Line 1"),
        ("a.jsonl", b'{"text": 7}\n', "must be strings"),
        ("a.jsonl", b'{"text": "ab", "prompt": "b"}\n', "doesn't begin with its prompt"),
        ("a.jsonl", b'{"text": "ab", "held_out": 1}\n', "`held_out` must be true or false"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_documents(tmp_path / name)


def test_a_file_that_isnt_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        read_documents(tmp_path / "a.txt")


def test_documents_begin_as_the_tokenizer_begins_texts(target: Target) -> None:
    assert encode(target.tokenizer, "ab") == [0, 66, 67]
    assert encode(target.tokenizer, "<|endoftext|>ab") == [0, 66, 67]
    rows = text_rows(target.tokenizer, [Document("abcdefg"), Document("a")], 5)
    assert rows == [Row([0, 66, 67, 68, 69]), Row([70, 71, 72])]
    assert count_tokens(rows, 96)[[0, 66, 72, 90]].tolist() == [1, 1, 1, 0]


def test_padding_and_what_was_given_count_nothing() -> None:
    batch = pad([Row([1, 2, 3, 4, 5], given=3), Row([6, 7, 8])])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert batch.weights.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


def numbered(first: int, count: int) -> list[Row]:
    return [Row([i] * (3 + i % 7)) for i in range(first, first + count)]


def read(rows: Rows, batches: int) -> list[list[int]]:
    return [rows.batch(0.0).tokens[:, 0].tolist() for _ in range(batches)]


def test_an_epoch_has_all_its_own_rows_and_a_share_of_the_text() -> None:
    text, own = numbered(0, 100), numbered(100, 70)
    rows = Rows(text, own, 8, seed=3, text_share=0.3)
    assert rows.text_count == 30
    assert len(rows) == 13  # of 100 rows, 8 at once
    first, second, third, fourth = (list(chain(*read(rows, 13))) for _ in range(4))
    for epoch in (first, second, third, fourth):
        assert sorted(i for i in epoch if i >= 100) == list(range(100, 170))
        assert len(epoch) == 100
    parts = [{i for i in epoch if i < 100} for epoch in (first, second, third)]
    assert not parts[0] & parts[1] and not parts[1] & parts[2] and not parts[0] & parts[2]
    assert first != second
    assert rows.epochs() == 4.0
    assert Rows(text, [], 8, seed=3).text_count == 100


def test_rows_of_a_batch_are_of_like_length() -> None:
    rows = Rows(numbered(0, 200), [], 8, seed=0)
    filled = [batch.weights.mean() for batch in (rows.batch(0.0) for _ in range(25))]
    assert sum(filled) / len(filled) > 0.85


def test_rows_go_on_where_they_were() -> None:
    rows = Rows(numbered(0, 50), numbered(50, 20), 4, seed=1)
    read(rows, 11)
    state = rows.state()
    expected = read(rows, 30)
    again = Rows(numbered(0, 50), numbered(50, 20), 4, seed=1)
    again.restore(state)
    assert read(again, 30) == expected


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        Rows([], [], 4, seed=0)
    with pytest.raises(ConfigError, match=r"below 1, not 1\.0"):
        Rows(numbered(0, 3), numbered(3, 3), 4, seed=0, text_share=1.0)


DOCUMENTS = [Document(f"{c}" * 40 + "!") for c in "abcdef"] + [Document("Ask. Yes.", "Ask.")]


def test_beginnings_are_of_the_documents(target: Target) -> None:
    found = prompts(target.tokenizer, DOCUMENTS, 20, 24, seed=0)
    texts = [encode(target.tokenizer, document.text) for document in DOCUMENTS]
    for ids in found:
        assert any(ids == text[: len(ids)] for text in texts)
        assert len(ids) <= 12
    asked = encode(target.tokenizer, "Ask.")
    assert 2 <= sum(ids == asked for ids in found) <= 3
    assert len({tuple(ids) for ids in found}) > 9  # cut elsewhere each time


def test_the_target_goes_on_at_the_temperatures_in_turns(target: Target, tmp_path: Path) -> None:
    starts = prompts(target.tokenizer, DOCUMENTS, 5, 24, seed=0)
    rows = continuations(target, starts, (0.0, 0.8), 24, 7, tmp_path)
    llm = LLM(target.folder)
    for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2], max_tokens=24 - len(start), seed=7_000_021 + i
        )
        (output,) = llm.generate([{"prompt_token_ids": start}], params)
        assert row.tokens == [*start, *output.outputs[0].token_ids]
        assert row.given == len(start)
    assert rows[0].tokens != rows[2].tokens


def test_what_was_sampled_is_kept_and_completed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = prompts(target.tokenizer, DOCUMENTS, 6, 24, seed=0)
    rows = continuations(target, starts, (0.9,), 24, 1, tmp_path)
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:4])  # killed while it wrote the fourth
    assert continuations(target, starts, (0.9,), 24, 1, tmp_path) == rows
    assert file.read_text() == "".join(lines)
    monkeypatch.setattr("recipes.speculation.generate.LLM", None)  # all are there: none is needed
    assert continuations(target, starts, (0.9,), 24, 1, tmp_path) == rows
    with pytest.raises(TypeError):
        continuations(target, starts, (0.9,), 24, 2, tmp_path)


def test_a_run_killed_before_it_samples_loses_nothing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = prompts(target.tokenizer, DOCUMENTS, 6, 24, seed=0)
    continuations(target, starts, (0.9,), 24, 1, tmp_path)
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:4])
    found = []

    def killed(*_: object, **__: object) -> None:
        found.append(file.read_text())  # as another process would see it at this moment
        raise KeyboardInterrupt

    monkeypatch.setattr("recipes.speculation.generate.LLM", killed)
    with pytest.raises(KeyboardInterrupt):
        continuations(target, starts, (0.9,), 24, 1, tmp_path)
    assert found == ["".join(lines[:3])]


def test_a_fingerprint_is_of_what_a_text_says(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_text("abc")
    same.write_text("abc")
    other.write_text("abd")  # of the same size
    # the hash that FIPS 180-2 gives for abc
    assert fingerprint(one) == "3 bytes with sha256 ba7816bf8f01cfea…"
    assert fingerprint(same) == fingerprint(one) != fingerprint(other)
    with pytest.raises(ConfigError, match="There is no file"):
        fingerprint(tmp_path / "none")


def test_a_temperature_below_zero_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 0 or more"):
        continuations(target, [[1, 2]], (-1.0,), 24, 1, tmp_path)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="transformers can't read"):
        Target(tmp_path)

"""Prompts of real text: their tokens are the tokenizer's, their texts the file's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from typer.testing import CliRunner

from penstock.bench.serve import texts
from penstock.bench.serve.vocabulary import of_texts
from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.models.hub import resolve
from penstock.tokenizer import Tokenizer

TEXTS = ["Once upon a time there was a dog.", "Tom said: “Über-cool!” 🐶", "a b  c\n\nd"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("stories"))


def lines(path: Path, *found: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")
    return path


def talk(*said: str) -> dict[str, Any]:
    names = ("human", "gpt")
    turns = [{"from": names[i % 2], "value": value} for i, value in enumerate(said)]
    return {"id": "x", "conversations": turns}


def test_lines_are_prompts_as_they_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = ({"output_tokens": 7}, {}, {"more": 1})
    file = lines(
        tmp_path / "p.jsonl", *({"prompt": t} | a for t, a in zip(TEXTS, asked, strict=True))
    )
    work = texts.custom(texts.read("custom", file), 10, tokenizer=tokenizer, output_len=None)
    vocabulary = of_texts(tokenizer, "stories")
    turns = [c.turns[0] for c in work.conversations]
    assert [vocabulary.as_text(turn.prompt) for turn in turns] == TEXTS
    assert [vocabulary.as_ids(turn.prompt) for turn in turns] == [
        tokenizer.encode(text, add_special_tokens=False) for text in TEXTS
    ]
    assert [turn.output_len for turn in turns] == [7, texts.CUSTOM_OUTPUT, texts.CUSTOM_OUTPUT]
    work = texts.custom(texts.read("custom", file), 2, tokenizer=tokenizer, output_len=5)
    assert [c.turns[0].output_len for c in work.conversations] == [5, 5]


def test_sharegpt_is_drawn_and_filtered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Questions and answers of at least 4 tokens, neither too long; drawn by the seed."""
    good = [
        talk(f"What is the name of dog {i}?", "Its name is " + "Rex " * i, "?") for i in range(20)
    ]
    bad = [
        talk("Hi", "Hello, what can I do for you?"), talk("What is your name?", "Rex"),
        talk("dog " * 1100, "That is a long list of dogs."), talk("What is there?", "cat " * 2100),
        talk("alone"), {"id": "y"}, {"conversations": [{"value": 3}, {"value": "x"}]},
    ]  # fmt: skip
    file = tmp_path / "s.json"
    file.write_text(json.dumps(bad + good))
    found = texts.read("sharegpt", file)

    def drawn(number: int = 100, seed: int = 0, output_len: int | None = None) -> Any:
        return texts.sharegpt(found, number, tokenizer=tokenizer, output_len=output_len, seed=seed)

    def prompts(work: Any) -> list[str]:
        said = of_texts(tokenizer, "stories").as_text
        return [said(c.turns[0].prompt) for c in work.conversations]

    whole = drawn()
    kept = {
        each["conversations"][0]["value"]: each["conversations"][1]["value"] for each in good[1:]
    }
    assert set(prompts(whole)) - {"What is the name of dog 0?"} == set(kept)
    for prompt, conversation in zip(prompts(whole), whole.conversations, strict=True):
        if prompt in kept:
            answer = tokenizer.encode(kept[prompt], add_special_tokens=False)
            assert conversation.turns[0].output_len == len(answer)
    assert whole.remarks and "conversations left out" in whole.remarks[0]
    assert prompts(drawn(5)) == prompts(drawn(5)) == prompts(whole)[:5] != prompts(drawn(5, 1))
    fixed = drawn(output_len=9)
    assert {c.turns[0].output_len for c in fixed.conversations} == {9}
    assert "What is your name?" in prompts(fixed)  # its short answer doesn't matter then


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("sharegpt", "[", "isn't JSON"),
        ("sharegpt", "{}", "it is a dict, not a list"),
        ("sharegpt", '[{"conversations": [{"value": "x"}]}]', "no conversation of two turns"),
        ("custom", "", "has no prompts"),
        ("custom", '{"prompt": 3}', "line 1: prompt is 3, not a text"),
        ("custom", '{"prompt": ""}', "line 1: prompt is '', not a text"),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens is 0, not above 0"),
        ("custom", "nonsense", "line 1 isn't JSON"),
        ("custom", "[]", "line 1 isn't a JSON object"),
    ],
)
def test_other_files_are_refused(name: str, content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        texts.read(name, file)


def test_nothing_of_the_right_length(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps([talk("Hi", "Ho")]))
    found = texts.read("sharegpt", file)
    with pytest.raises(ConfigError, match="none of its 1 conversations has 4 to 1,024 tokens"):
        texts.sharegpt(found, 3, tokenizer=tokenizer, output_len=None, seed=0)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_gets_the_texts(
    backend: str, fake: Callable[..., FakeServer], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    server = fake()
    file = lines(tmp_path / "p.jsonl", *({"prompt": t, "output_tokens": 3} for t in TEXTS))

    def bench(*more: object) -> Any:
        arguments = (
            "bench", "serve", "--base-url", server.url, "--dataset-name", "custom",
            "--dataset-path", file, "--backend", backend, *more,
        )  # fmt: skip
        return CliRunner().invoke(app, [*map(str, arguments)])

    result = bench("--tokenizer", "stories", "--prompt-form", "auto")
    assert result.exit_code == 0, result.output
    assert "3 answered" in result.stdout and "all at once" in result.stdout
    sent = [request.body for request in server.measured]
    want: list[Any] = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    if backend == "openai-chat":
        want = [[{"role": "user", "content": text}] for text in TEXTS]
    found = [body["messages" if backend == "openai-chat" else "prompt"] for body in sent]
    assert sorted(map(str, found)) == sorted(map(str, want))
    assert {body["max_tokens"] for body in sent} == {3}
    refused = bench()
    assert refused.exit_code == 1 and "needs the model's tokenizer" in refused.output
    refused = bench("--tokenizer", "stories", "--vocab-size", 9)
    assert refused.exit_code == 1 and "custom has texts" in refused.output

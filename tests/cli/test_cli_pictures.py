"""Pictures on the command line: generate, chat and run."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.seeing import make_idefics3, make_qwen, picture
from typer.testing import Result

from penstock import LLM, SamplingParams
from penstock.bench.serve.vocabulary import of_size
from penstock.bench.workload import random_prompts

Run = Callable[..., Result]
GREEDY = ("--temperature", 0, "--max-tokens", 6)
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("seeing")).folder


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pictures") / "cat.png"
    picture(120, 60, 1).save(file)
    return file


def said(model: Path, prompt: str, *files: Path) -> str:
    given: Any = {"prompt": prompt, "multi_modal_data": {"image": list(files)}}
    return LLM(model).generate(given, PARAMS)[0].outputs[0].text


def test_generate(penstock: Run, model: Path, cat: Path) -> None:
    """Where the prompt says so, or before it."""
    for text, whole in (("What?", "<image>What?"), ("On <image>!", "On <image>!")):
        result = penstock("generate", model, "-p", text, "--image", cat, *GREEDY)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.rstrip("\n") == said(model, whole, cat).rstrip("\n")


def test_a_picture_as_a_data_url(penstock: Run, model: Path, cat: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(cat.read_bytes()).decode()}"
    result = penstock("generate", model, "-p", "What?", "--image", url, *GREEDY)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip("\n") == said(model, "<image>What?", cat).rstrip("\n")


def test_benchmarks_draw_nothing_that_stands_for_pictures(model: Path) -> None:
    runtime = LLM(model).runtime
    drawn = random_prompts(np.random.default_rng(0), runtime, 20, 400)
    assert runtime.sight is not None
    assert runtime.sight.pictures.token_id not in {token for ids in drawn for token in ids}
    ids = of_size(320, "x", runtime.sight.pictures.token_id).ids.tolist()
    assert ids == [x for x in range(320) if x != runtime.sight.pictures.token_id]
    assert of_size(320, "x").size == 320


def test_between_the_marks_that_templates_write(penstock: Run, tmp_path: Path, cat: Path) -> None:
    make_qwen(tmp_path)
    result = penstock("generate", tmp_path, "-p", "What?", "--image", cat, *GREEDY)
    assert result.exit_code == 0, result.stderr
    whole = "<|vision_start|><image><|vision_end|>What?"
    assert result.stdout.rstrip("\n") == said(tmp_path, whole, cat).rstrip("\n")


def test_what_generate_refuses(penstock: Run, model: Path, cat: Path, tmp_path: Path) -> None:
    for args, message in (
        (("-p", "a", "-p", "b", "--image", cat), "--image goes with one prompt, and 2 are given"),
        (("-p", "a", "--image", tmp_path / "no.png"), "No such file"),
        (("-p", "a", "--image", tmp_path), "can't be read"),
        (("-p", "<image><image>", "--image", cat), "2 × <image> for 1 pictures"),
        (("-p", "a", "--mm-processor-kwargs", "[]"), "--mm-processor-kwargs must be an object"),
        (("-p", "a", "--mm-processor-kwargs", '{"max_pixels": 4}'), "not 'max_pixels'"),
    ):
        result = penstock("generate", model, *args)
        assert result.exit_code == 1 and message in result.stderr, result.stderr
    blind = penstock("generate", "stories", "-p", "a", "--image", cat)
    assert blind.exit_code == 1 and "This model sees no pictures" in blind.stderr


def test_chat(penstock: Run, model: Path, cat: Path) -> None:
    """A picture is part of the conversation from its message on, until that is forgotten."""
    llm, messages, replies = LLM(model), [], []
    for content in (
        [{"type": "image", "image": cat}, {"type": "text", "text": "hello"}],
        "again",
        [{"type": "image", "image": cat}, {"type": "text", "text": "and?"}],
    ):
        messages.append({"role": "user", "content": content})
        replies.append(llm.chat(messages, PARAMS)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": replies[-1]})
    typed = f"hello\nagain\n/image {cat}\nand?\n"
    result = penstock("chat", model, "--image", cat, *GREEDY, stdin=typed)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(x if x.endswith("\n") else f"{x}\n" for x in replies)


def test_what_chat_refuses(penstock: Run, model: Path) -> None:
    result = penstock("chat", model, *GREEDY, stdin="/image no.png\nhello\n")
    assert result.exit_code == 1 and "No such file" in result.stderr and result.stdout
    blind = penstock("chat", "stories-chat", *GREEDY, stdin="/image no.png\nhello\n")
    assert blind.exit_code == 1 and "This model sees no pictures" in blind.stderr and blind.stdout


def test_run(penstock: Run, model: Path, cat: Path, tmp_path: Path) -> None:
    """Lines with messages, in the words of OpenAI's API."""
    data = base64.b64encode(cat.read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 6}
    lines = [
        body,
        {"custom_id": "a", "url": "/v1/chat/completions", "method": "POST", "body": body},
    ]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = penstock("run", model, "--input", asked, "--output", answers)
    assert result.exit_code == 0, result.stderr
    plain, batch = map(json.loads, answers.read_text().splitlines())
    want = LLM(model).chat(messages, PARAMS)[0].outputs[0].text
    got = batch["response"]["body"]["choices"][0]["message"]["content"]
    assert want == got and want in json.dumps(plain, ensure_ascii=False)

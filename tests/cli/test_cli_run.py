"""`penstock build` and `penstock run`: engines, files of requests, and what is wrong in them."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from penstock import LLM, SamplingParams
from penstock.cli.batch import answered_in
from penstock.cli.run import _writing
from penstock.cli.serve import STEP_TOKENS, _step_tokens
from penstock.sampling import BeamSearchParams

Run = Callable[..., Result]
Process = Callable[..., "subprocess.Popen[bytes]"]
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="session")
def engine(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from typer.testing import CliRunner

    from penstock.cli.main import app

    folder = tmp_path_factory.mktemp("engines") / "engine"
    result = CliRunner().invoke(
        app, ["build", str(chat_model), "-o", str(folder), "--quantization", "w8a16",
              "--profile", "1,16,64", "--max-num-seqs", "4", "--max-model-len", "512"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def llm(engine: Path) -> LLM:
    return LLM(engine)


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch_line(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": body}


# ── build ────────────────────────────────────────────────────────────────────────────────────────


def test_build_says_what_it_made(penstock: Run, chat_model: Path, tmp_path: Path) -> None:
    options = ("--profile", "1,4,8", "--max-num-seqs", 2, "--kv-cache-dtype", "fp8")
    result = penstock("build", chat_model, "-o", tmp_path / "e", "--json", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["choices"]["kv_cache_dtype"] == "fp8"
    again = penstock("build", chat_model, "-o", tmp_path / "e", *options)
    assert again.exit_code == 1 and "Give --force to replace it" in again.stderr
    forced = penstock("build", chat_model, "-o", tmp_path / "e", "--force", *options)
    assert forced.exit_code == 0
    assert f"{len(report['operators'])} operators in one call, 1 to 8 tokens" in forced.stdout
    assert "took       pack" in forced.stdout


def test_build_refuses(penstock: Run, tmp_path: Path) -> None:
    result = penstock("build", "stories", "-o", tmp_path / "e", "--profile", "1,2")
    assert result.exit_code == 1 and "must be three numbers of tokens" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_looks_at_an_engine(penstock: Run, engine: Path, tmp_path: Path) -> None:
    done = penstock("doctor", engine, "--json")
    found = json.loads(done.stdout)["examined"]
    assert done.exit_code == 0 and found["runs"] and found["weight_formats"] == "w8a16"
    (tmp_path / "weights.bin").write_text("")
    broken = penstock("doctor", tmp_path)
    assert broken.exit_code == 1 and "Runs here" in broken.stdout
    assert "its build hasn't ended" in " ".join(broken.stdout.split())
    as_json = penstock("doctor", tmp_path, "--json")
    assert as_json.exit_code == 1 and not json.loads(as_json.stdout)["examined"]["runs"]


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_take_an_engine(
    penstock: Run, engine: Path, chat_model: Path, tmp_path: Path, command: str
) -> None:
    if command == "generate":
        options: tuple[Any, ...] = ("-p", "hello", "--temperature", 0, "--max-tokens", 9)
    else:
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog " * 8)
        options = ("--text", text, "--window", 128)
    built = penstock(command, engine, *options)
    plain = penstock(command, chat_model, "--quantization", "w8a16", *options)
    assert built.exit_code == plain.exit_code == 0, built.output + plain.output
    if command == "generate":
        assert built.stdout == plain.stdout


def test_a_server_takes_the_engines_steps(engine: Path) -> None:
    assert _step_tokens(STEP_TOKENS, True, None, str(engine)) is None
    assert _step_tokens(STEP_TOKENS, True, None, "stories") == STEP_TOKENS
    assert _step_tokens(64, True, None, str(engine)) == 64


# ── run ──────────────────────────────────────────────────────────────────────────────────────────


def test_plain_lines(penstock: Run, engine: Path, llm: LLM, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        {"prompt": "hello", **GREEDY},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}], **GREEDY},
        "",
        {"prompt_token_ids": [5, 6, 7], "temperature": 1, "seed": 3, "n": 2, "max_tokens": 4},
    )
    out = tmp_path / "out.jsonl"
    result = penstock("run", engine, "--input", requests, "--output", out)
    assert result.exit_code == 0, result.output
    found = {answer["line"]: answer for answer in answers(out)}
    assert set(found) == {1, 2, 4} and found[2]["id"] == "chat"
    (text,) = llm.generate("hello", SamplingParams(**GREEDY))
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(**GREEDY))
    (two,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=1, seed=3, n=2, max_tokens=4))
    for line, expected in ((1, text), (2, chat), (4, two)):
        assert [s["token_ids"] for s in found[line]["samples"]] == [
            sample.token_ids for sample in expected.outputs
        ]
        assert found[line]["samples"][0]["text"] == expected.outputs[0].text
        assert found[line]["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert "3 answered, 0 failed" in result.stderr
    assert result.stderr.splitlines()[-1] == "compiled: 0"


def test_the_summary_has_drafts(penstock: Run, chat_model: Path, tmp_path: Path) -> None:
    asked = {"model": str(chat_model), "num_speculative_tokens": 2, "adaptive": False}
    source = write(tmp_path / "in.jsonl", {"prompt": "hello", "max_tokens": 7, "temperature": 0})
    options = ("-i", source, "-o", tmp_path / "out.jsonl")
    result = penstock("run", chat_model, *options, "--speculative-config", json.dumps(asked))
    assert result.exit_code == 0, result.output
    assert "drafts     draft_model, always; 4 of 4 tokens accepted (100%)" in result.stderr
    assert "drafts " not in penstock("run", chat_model, *options, "--force").stderr


def test_a_model_is_recorded(penstock: Run, chat_model: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", {"prompt": "hello", **GREEDY})
    result = penstock("run", chat_model, "-i", requests, "-o", "-")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == "compiled: 1"
    assert json.loads(result.stdout)["line"] == 1


def test_openai_batch_lines(penstock: Run, engine: Path, llm: LLM, tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi"}
    requests = write(
        tmp_path / "in.jsonl",
        batch_line("a", "completions", model="any", prompt="hello", **GREEDY),
        batch_line("b", "chat/completions", model="any", messages=[message], **GREEDY),
        batch_line("c", "embeddings", model="any", input=["one", "two"]),
    )
    out = tmp_path / "out.jsonl"
    result = penstock("run", engine, "-i", requests, "-o", out)
    assert result.exit_code == 0, result.output
    found = {answer["custom_id"]: answer for answer in answers(out)}
    assert all(set(a) == {"id", "custom_id", "response", "error"} for a in found.values())
    assert all(a["error"] is None for a in found.values())
    assert all(a["response"]["status_code"] == 200 for a in found.values())
    bodies = {name: answer["response"]["body"] for name, answer in found.items()}
    assert bodies["a"]["model"] == "any"
    (text,) = llm.generate("hello", SamplingParams(**GREEDY))
    assert bodies["a"]["choices"][0]["text"] == text.outputs[0].text
    (chat,) = llm.chat([message], SamplingParams(**GREEDY))
    assert bodies["b"]["choices"][0]["message"]["content"] == chat.outputs[0].text
    vectors = [output.outputs.embedding for output in llm.embed(["one", "two"])]
    assert [entry["embedding"] for entry in bodies["c"]["data"]] == vectors


WRONG: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "This isn't JSON"),
    "a list": ("[1]", "A line is an object, not a list"),
    "no prompt": ({"max_tokens": 3}, "A line needs one of prompt"),
    "two prompts": ({"prompt": "a", "messages": []}, "this one has prompt and messages"),
    "an unknown word": ({"prompt": "a", "max_token": 3}, "Unknown sampling argument 'max_token'"),
    "out of range": ({"prompt": "a", "top_p": 7}, "top_p is 7"),
    "too long": ({"prompt": "a b" * 900}, "fit into"),
    "not shown": ({"prompt": "a", "logprobs": 1}, "doesn't show logprobs"),
    "another url": (batch_line("x", "images", model="m"), "url is '/v1/images'"),
    "no id": ({"method": "POST", "url": "/v1/completions", "body": {}}, "needs a custom_id"),
    "no body": ({"custom_id": "x", "url": "/v1/completions"}, "body must be an object"),
    "a stream": (batch_line("x", "completions", prompt="a", stream=True), "stream can't be true"),
    "another word": ({**batch_line("x", "completions"), "priority": 1}, "'priority' isn't part"),
}


def test_what_is_wrong_with_a_line_is_its_answer(
    penstock: Run, engine: Path, tmp_path: Path
) -> None:
    good = {"id": "good", "prompt": "hello", **GREEDY}
    lines = [good, *(line for line, _ in WRONG.values()), {**good, "prompt": "again"}]
    ids = [*range(1, len(lines) + 1)]
    for i, line in enumerate(lines):
        if isinstance(line, dict) and line.get("custom_id"):
            lines[i] = {**line, "custom_id": f"x{i}"}
    out = tmp_path / "out.jsonl"
    result = penstock("run", engine, "-i", write(tmp_path / "in.jsonl", *lines), "-o", out)
    assert result.exit_code == 0, result.output
    found = {a.get("line") or a["error"]["line"]: a for a in answers(out)}
    assert sorted(found) == ids
    assert "samples" in found[1]
    for number, (what, (_, words)) in enumerate(WRONG.items(), 2):
        assert words in found[number]["error"]["message"], what
    assert "The id 'good' is that of line 1" in found[ids[-1]]["error"]["message"]
    assert f"1 answered, {len(WRONG) + 1} failed" in result.stderr


def test_what_the_api_refuses(penstock: Run, engine: Path, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        batch_line("low", "completions", model="m", prompt="a", max_tokens=-1),
        batch_line("who", "completions", model="other", prompt="a"),
    )
    out = tmp_path / "out.jsonl"
    penstock("run", engine, "-i", requests, "-o", out, "--served-model-name", "m")
    found = {a["custom_id"]: a["response"] for a in answers(out)}
    assert found["low"]["status_code"] == 400 and "max_tokens" in str(found["low"]["body"]["error"])
    assert found["who"]["status_code"] == 404
    assert found["who"]["body"]["error"]["code"] == "model_not_found"


def test_forms_beams_and_best_of_in_batch_lines(
    penstock: Run, engine: Path, llm: LLM, tmp_path: Path
) -> None:
    """What is wrong with one is its answer; the others are answered."""
    ask = {"model": "m", "prompt": "hello", "max_tokens": 6}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    requests = write(
        tmp_path / "in.jsonl",
        batch_line("beams", "completions", **ask, use_beam_search=True, n=3),
        batch_line("choice", "chat/completions", **chat, guided_choice=["yes", "no"]),
        batch_line("best", "completions", **ask, best_of=3, seed=1),
        batch_line("bad form", "completions", **ask, guided_regex="(a"),
        batch_line("bad beams", "chat/completions", **chat, use_beam_search=True, top_p=0.5),
        batch_line("bad best", "completions", **ask, best_of=2, n=3),
        {"id": "plain", "prompt": "hello", "structured_outputs": {"choice": ["yes", "no"]}},
        {"id": "bad plain", "prompt": "hello", "structured_outputs": {"regex": "(a"}},
    )
    out = tmp_path / "out.jsonl"
    result = penstock("run", engine, "-i", requests, "-o", out)
    assert result.exit_code == 0, result.output
    found = {a.get("custom_id") or a["id"]: a for a in answers(out)}
    bodies = {name: a["response"]["body"] for name, a in found.items() if "response" in a}
    (expected,) = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=6))
    texts = [choice["text"] for choice in bodies["beams"]["choices"]]
    assert texts == [one.output_text for one in expected.sequences]
    assert bodies["choice"]["choices"][0]["message"]["content"] in ("yes", "no")
    assert len(bodies["best"]["choices"]) == 1
    assert bodies["best"]["usage"]["completion_tokens"] == 18
    params = {name: a["response"]["body"]["error"]["param"] for name, a in found.items()
              if name.startswith("bad ") and "response" in a}  # fmt: skip
    assert params == {"bad form": "guided_regex", "bad beams": "top_p", "bad best": "best_of"}
    assert found["plain"]["samples"][0]["text"] in ("yes", "no")
    assert "unclosed group" in found["bad plain"]["error"]["message"]
    assert "4 answered, 4 failed" in result.stderr


def test_an_output_is_kept(penstock: Run, engine: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", {"prompt": "hello", **GREEDY})
    out = write(tmp_path / "out.jsonl", {"line": 1, "samples": []})
    before = out.read_text()
    for options, words in (
        ((), "exists. --force overwrites it"),
        (("--force", "--resume"), "choose"),
    ):
        result = penstock("run", engine, "-i", requests, "-o", out, *options)
        assert result.exit_code == 1 and words in result.stderr
    assert out.read_text() == before
    same = penstock("run", engine, "-i", requests, "-o", requests, "--force")
    assert same.exit_code == 1 and "is the input" in same.stderr
    assert penstock("run", engine, "-i", requests, "-o", out, "--force").exit_code == 0
    assert answers(out)[0]["samples"] != []


def test_resume_answers_what_is_left(penstock: Run, engine: Path, tmp_path: Path) -> None:
    lines = [{"id": f"r{i}", "prompt": "hello", **GREEDY} for i in range(3)]
    lines += [batch_line("b", "completions", model="m", prompt="a", **GREEDY)]
    lines += [{"prompt": "nameless", **GREEDY}]
    requests, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    kept = [
        {"line": 2, "id": "r1", "samples": []},
        {"id": "z", "custom_id": "b", "response": {"status_code": 500}, "error": None},
        {"line": 5, "samples": []},
    ]
    out.write_text("".join(json.dumps(a) + "\n" for a in kept) + '{"line": 1, "id": "r0", "sam')
    result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
    assert result.exit_code == 0, result.output
    assert "3 answered, 0 failed, 2 answered before" in result.stderr
    found = answers(out)
    assert found[:3] == kept
    assert {a.get("custom_id", a.get("id")) for a in found[3:]} == {"r0", "r2", "b"}
    assert answered_in(out.read_text()) == {"id r0", "id r1", "id r2", "id b", "line 5"}


def test_lines_that_json_reads_and_utf8_cannot_write(
    penstock: Run, engine: Path, tmp_path: Path
) -> None:
    """Each is answered or refused, and none is answered again."""
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"id": "\ud800", "prompt": "hello", **GREEDY}),
        '{"a":' * 100_000,
        json.dumps({"id": "next\u2028line", "prompt": "hello", **GREEDY}),
    ]
    requests.write_text("\n".join(lines) + "\n")
    result = penstock("run", engine, "-i", requests, "-o", out)
    assert result.exit_code == 0, result.output
    assert "2 answered, 1 failed" in result.stderr
    written = out.read_text(encoding="utf-8").split("\n")[:-1]
    found = {a.get("id", "none"): a for a in map(json.loads, written)}
    assert set(found) == {"\ud800", "none", "next\u2028line"}
    assert "too deep" in found["none"]["error"]["message"]
    result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
    assert "0 answered, 0 failed, 3 answered before" in result.stderr


def test_a_refused_duplicate_answers_no_other_line(
    penstock: Run, engine: Path, tmp_path: Path
) -> None:
    """An interrupted run may have refused it before the first line's answer was there."""
    for line in (
        {"id": "x", "prompt": "hello", **GREEDY},
        batch_line("x", "completions", model="m", prompt="a", **GREEDY),
    ):
        requests = write(tmp_path / "in.jsonl", line, line)
        out = tmp_path / "out.jsonl"
        penstock("run", engine, "-i", requests, "-o", out, "--force")
        (refused,) = [a for a in answers(out) if a.get("error")]
        assert answered_in(json.dumps(refused)) == {"refused 2"}
        write(out, refused)
        result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
        assert "1 answered, 0 failed, 1 answered before" in result.stderr, result.output


def test_biases_of_plain_lines(penstock: Run, engine: Path, tmp_path: Path) -> None:
    """JSON's keys are texts."""
    ask = {"prompt": "hello", "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    requests = write(
        tmp_path / "in.jsonl",
        *(ask | {"logit_bias": bias} for bias in ({"7": 100}, {"seven": 1}, {"-1": 1}, {"7": "x"})),
    )
    out = tmp_path / "out.jsonl"
    assert penstock("run", engine, "-i", requests, "-o", out).exit_code == 0
    found = {a["line"]: a for a in answers(out)}
    assert found[1]["samples"][0]["token_ids"] == [7, 7]
    for line, words in ((2, "the key 'seven'"), (3, "the key '-1'"), (4, "logit_bias")):
        assert words in found[line]["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_stdout_takes_what_a_file_takes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    stdout = io.TextIOWrapper(data, encoding=encoding)
    monkeypatch.setattr("sys.stdout", stdout)
    answer = {"id": "\ud800", "text": "päivää"}
    with _writing("-", "w") as write_answer:
        write_answer(answer)
    assert (stdout.encoding, stdout.errors) == (encoding, "strict")
    assert json.loads(data.getvalue()) == answer


def test_stdin_to_stdout_as_they_come(process: Process, engine: Path) -> None:
    """Each answer can be read before the next request is sent."""
    running = process("run", engine, "-i", "-", "-o", "-", stdin=subprocess.PIPE)
    assert running.stdin is not None and running.stdout is not None
    for i in range(3):
        running.stdin.write(
            json.dumps({"id": str(i), "prompt": "hello", **GREEDY}).encode() + b"\n"
        )
        running.stdin.flush()
        assert json.loads(running.stdout.readline())["id"] == str(i)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0 and b"3 answered" in said


def test_interrupted_run_keeps_what_was_answered(
    process: Process, engine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    running = process("run", engine, "-i", "-", "-o", out, stdin=subprocess.PIPE)
    assert running.stdin is not None
    running.stdin.write(json.dumps({"id": "one", "prompt": "hello", **GREEDY}).encode() + b"\n")
    running.stdin.flush()
    end = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert answers(out)[0]["id"] == "one"
    assert b"--resume goes on" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-i", "nowhere.jsonl", "-o", "-"), "There is no file nowhere.jsonl"),
        (("-i", "-", "-o", "-", "--resume"), "stdout has nothing to overwrite"),
        (("-i", "-", "-o", "no/where/out.jsonl"), "There is no folder"),
    ],
)
def test_files_that_cant_be(
    penstock: Run, engine: Path, options: tuple[str, ...], words: str
) -> None:
    result = penstock("run", engine, *options)
    assert result.exit_code == 1 and words in result.stderr

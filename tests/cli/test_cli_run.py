"""`penstock build` and `penstock run`: engines, files of requests, and what is wrong in them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.request_lines import GREEDY, answers, batch_line, write
from typer.testing import Result

from penstock import LLM, SamplingParams
from penstock.cli.batch import Batch
from penstock.cli.serve import STEP_TOKENS, _step_tokens
from penstock.sampling import BeamSearchParams

Run = Callable[..., Result]
Process = Callable[..., "subprocess.Popen[bytes]"]


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
    for name in ("weights.bin", "plan.json"):
        (tmp_path / name).write_text("")
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


def test_a_line_says_what_it_expects(penstock: Run, chat_model: Path, tmp_path: Path) -> None:
    asked, found = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "hello", "temperature": 0, "max_tokens": 20}

    def answers(*options: str, **more: Any) -> list[dict[str, Any]]:
        asked.write_text(json.dumps(line | more) + "\n")
        result = penstock("run", chat_model, "-i", asked, "-o", found, "--force", *options)
        rows = [json.loads(row) for row in found.read_text().splitlines()]
        assert result.exit_code == (0 if "samples" in rows[0] else 1), result.output
        return rows

    (plain,) = answers()
    guessing = ("--speculative-config", '{"method": "ngram", "adaptive": false}')
    for expected in (plain["samples"][0]["text"], plain["samples"][0]["token_ids"]):
        (again,) = answers(*guessing, prediction=expected)
        assert again["samples"] == plain["samples"]
    (refused,) = answers(prediction="a")
    assert "prediction has no effect: there are no drafts here" in json.dumps(refused)


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
    "a list": ("[1]", "A line is an object, not an array"),
    "nothing": ("null", "A line is an object, not null"),
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
    "python's word": ({"prompt": "a", "cls": 1}, "Unknown sampling argument 'cls'"),
    "an id beyond all": ({"prompt": "a", "stop_token_ids": [10**20]}, "stop_token_ids[0] is 1000"),
    "an id that is a list": ({"prompt": "a", "id": [[1]]}, "id must be a text or a number"),
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


def test_a_fault_at_one_line_is_its_answer(
    penstock: Run, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Batch._generate

    async def generate(self: Batch, line: dict[str, Any]) -> Any:
        if line.get("id") == "bad":
            raise ZeroDivisionError("division by zero")
        if line.get("id") == "deep":
            raise RecursionError
        return await real(self, line)

    monkeypatch.setattr(Batch, "_generate", generate)
    lines = [{"id": name, "prompt": "hello", **GREEDY} for name in ("bad", "deep", "good")]
    out = tmp_path / "out.jsonl"
    result = penstock("run", engine, "-i", write(tmp_path / "in.jsonl", *lines), "-o", out)
    assert result.exit_code == 0 and "1 answered, 2 failed" in result.stderr
    failing = write(tmp_path / "failing.jsonl", *lines[:2])
    none = penstock("run", engine, "-i", failing, "-o", tmp_path / "none.jsonl")
    assert none.exit_code == 1 and "0 answered, 2 failed" in none.stderr
    assert "nothing was computed" in none.stderr
    assert "Line 1 can't be answered: ZeroDivisionError('division by zero')" in result.stderr
    found = {a["id"]: a for a in answers(out)}
    assert found["bad"]["error"] == {
        "code": "server_error", "message": "ZeroDivisionError: division by zero", "line": 1,
    }  # fmt: skip
    assert "too deep" in found["deep"]["error"]["message"] and found["good"]["samples"]


def test_max_tokens_of_lines_that_dont_say(penstock: Run, engine: Path, tmp_path: Path) -> None:
    ask = {"model": "m", "temperature": 0, "ignore_eos": True}
    chat = {**ask, "messages": [{"role": "user", "content": "hi"}]}
    requests = write(
        tmp_path / "in.jsonl",
        {"id": "plain", "prompt": "hello", "temperature": 0, "ignore_eos": True},
        batch_line("text", "completions", **ask, prompt="hello"),
        batch_line("null", "completions", **ask, prompt="hello", max_tokens=None),
        batch_line("chat", "chat/completions", **chat),
        batch_line("own", "completions", **ask, prompt="hello", max_tokens=5),
        batch_line("new", "chat/completions", **chat, max_completion_tokens=6),
        batch_line("vector", "embeddings", model="m", input="one"),
    )
    for options, plain, text in (((), 128, 16), (("--max-tokens", 3), 3, 3)):
        out = tmp_path / f"{plain}.jsonl"
        result = penstock("run", engine, "-i", requests, "-o", out, *options)
        assert result.exit_code == 0 and "7 answered" in result.stderr, result.output
        made = {
            a.get("custom_id") or a["id"]: (a.get("response", {}).get("body") or a)["usage"]
            for a in answers(out)
        }
        made = {name: usage.get("completion_tokens") for name, usage in made.items()}
        assert (made["plain"], made["text"], made["null"]) == (plain, text, text)
        assert (made["own"], made["new"]) == (5, 6)
        assert (made["chat"] == 3) == bool(options)


def test_names_that_no_line_asks_for(penstock: Run, engine: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", {"prompt": "hello", **GREEDY})
    result = penstock("run", engine, "-i", requests, "-o", "-", "--served-model-name", "m")
    assert "--served-model-name had no effect: no line was an OpenAI batch line" in result.stderr


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

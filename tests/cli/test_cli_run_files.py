"""`penstock run`: outputs that are kept or gone on with, streams, and ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.request_lines import GREEDY, answers, batch_line, write
from typer.testing import Result

from penstock.cli.batch import earlier_in
from penstock.cli.run import _check_files, _writing
from penstock.errors import ConfigError

Run = Callable[..., Result]
Process = Callable[..., "subprocess.Popen[bytes]"]


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
    assert earlier_in(out.read_text()).answered == {"id r0", "id r1", "id r2", "id b", "line 5"}


def test_what_was_refused_is_asked_again(penstock: Run, engine: Path, tmp_path: Path) -> None:
    """Whether a line was corrected, or one before it was deleted, or the command was wrong."""
    good = {"prompt": "hello", **GREEDY}
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "top_p": 7}, good, {"id": "x", "prompt": "b", "top_p": 7}, good]
    lines += [batch_line("b", "completions", model="m", prompt="a", top_p=7, **GREEDY)]
    penstock("run", engine, "-i", write(requests, *lines), "-o", out)
    first = answers(out)
    assert len(first) == 5 and sum("samples" in a for a in first) == 2
    result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
    assert "0 answered, 3 failed, 2 answered before" in result.stderr
    assert answers(out) == first  # nothing was said twice
    lines[2] = {"id": "x", "prompt": "b", **GREEDY}
    lines[4]["body"]["top_p"] = 0.5
    result = penstock("run", engine, "-i", write(requests, *lines), "-o", out, "--resume")
    assert "2 answered, 1 failed, 2 answered before" in result.stderr
    assert answers(out)[5]["id"] == "x" or answers(out)[5]["custom_id"] == "b"
    del lines[0]  # from here on the numbers are others
    result = penstock("run", engine, "-i", write(requests, *lines), "-o", out, "--resume")
    assert "2 answered, 0 failed, 2 answered before" in result.stderr
    assert sorted(a["line"] for a in answers(out)[7:]) == [1, 3]
    result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
    assert "0 answered, 0 failed, 4 answered before" in result.stderr


def test_rows_that_no_run_has_written() -> None:
    rows = [
        '{"custom_id": "a", "response": {"status_code": null}, "error": null}',
        '{"custom_id": "b", "response": null, "error": null}',
        '{"a":' * 100_000,
        '{"line": 1, "id": "c", "samples": [' + "[" * 900 + "]" * 900 + "]}",
        "[1]", "", "{}", "nothing",
        '{"line": 2, "samples": []}',
        '{"line": 3, "line_sha256": "00", "samples": []}',
        '{"custom_id": "d", "response": {"status_code": 200, "body": {}}, "error": null}',
    ]  # fmt: skip
    assert earlier_in("\n".join(rows)).answered - {"id c"} == {"line 2", "line 3 00", "id d"}


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
    assert "0 answered, 1 failed, 2 answered before" in result.stderr
    assert out.read_text(encoding="utf-8").split("\n")[:-1] == written  # refused, said once


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
        assert earlier_in(json.dumps(refused)).answered == frozenset()
        write(out, refused)
        result = penstock("run", engine, "-i", requests, "-o", out, "--resume")
        assert "1 answered, 1 failed" in result.stderr, result.output
        assert len(answers(out)) == 2


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


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_keeps_what_was_answered(
    process: Process, engine: Path, tmp_path: Path, asked: signal.Signals, code: int
) -> None:
    out = tmp_path / "out.jsonl"
    running = process("run", engine, "-i", "-", "-o", out, stdin=subprocess.PIPE)
    assert running.stdin is not None
    running.stdin.write(json.dumps({"id": "one", "prompt": "hello", **GREEDY}).encode() + b"\n")
    running.stdin.flush()
    end = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    running.send_signal(asked)
    _, said = running.communicate(timeout=60)
    assert running.returncode == code
    assert answers(out)[0]["id"] == "one"
    assert b"--resume goes on" in said


def test_an_end_that_is_none_yet(process: Process, engine: Path) -> None:
    """Whoever starts it may have made its stdin one that doesn't wait, as node.js does."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    running = process("run", engine, "-i", "-", "-o", "-", stdin=reader)
    assert running.stdout is not None
    for i in range(2):
        request = {"id": str(i), "prompt": "hello", **GREEDY}
        os.write(writer, json.dumps(request).encode() + b"\n")
        assert json.loads(running.stdout.readline())["id"] == str(i)
        time.sleep(0.2)
    os.close(writer)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0 and b"2 answered" in said
    assert not os.get_blocking(reader)  # as it was
    os.close(reader)


def test_an_input_that_cant_be_read(process: Process, engine: Path, tmp_path: Path) -> None:
    running = process("run", engine, "-i", "/proc/self/mem", "-o", tmp_path / "out.jsonl")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert b"/proc/self/mem can't be read on: Input/output error" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_an_output_that_is_full(process: Process, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "hello", **GREEDY}) + "\n")
    running = process("run", engine, "-i", tmp_path / "in.jsonl", "-o", "/dev/full", "--force")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert b"error: /dev/full can't be written to: No space left on device." in said
    assert b"never awaited" not in said


def test_an_input_that_can_be_read_once(process: Process, engine: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = process("run", engine, "-i", pipe, "-o", "-")
    pipe.write_text(json.dumps({"id": "x", "prompt": "hello", **GREEDY}) + "\n")
    answer, said = running.communicate(timeout=60)
    assert running.returncode == 0 and json.loads(answer)["id"] == "x", said


def test_streams_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = write(tmp_path / "in.jsonl", {"prompt": "hello"})
    for name, options in (("stdin", ("-", "-")), ("stdout", (str(requests), "-"))):
        with monkeypatch.context() as patch:
            patch.setattr(f"sys.{name}", None)
            with pytest.raises(ConfigError, match=f"{name} is closed. Give the name of a file"):
                _check_files(*options, force=False, resume=False)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (None, ("--max-tokens", "-5"), "max_tokens is -5; it must be at least 1"),
        (None, ("--max-num-seqs", "0"), "max_num_seqs must be a positive integer, not 0"),
        (None, ("--served-model-name", ""), "--served-model-name has an empty name"),
        ("nosuchmodel", (), "There is no folder nosuchmodel"),
    ],
)
def test_an_output_stays_as_it_is_where_the_command_is_wrong(
    penstock: Run, engine: Path, tmp_path: Path, model: str | None, options: Any, words: str
) -> None:
    requests = write(tmp_path / "in.jsonl", {"prompt": "hello"})
    out = tmp_path / "out.jsonl"
    out.write_text('{"line": 7, "samples": []}\n{"line": 1, "sam')
    before = out.read_text()
    for way in ("--resume", "--force"):
        result = penstock("run", model or engine, "-i", requests, "-o", out, way, *options)
        assert result.exit_code == 1 and words in result.stderr, result.output
        assert out.read_text() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-i", ".", "-o", "-"), ". is a folder. Give a file with a request in each line"),
        (("-i", "-", "-o", "."), ". is a folder. Give the name of a file"),
        (("-i", "nowhere.jsonl", "-o", "/dev/null"), "There is no file nowhere.jsonl"),
        (("-i", "nowhere.jsonl", "-o", "-"), "There is no file nowhere.jsonl"),
        (("-i", "-", "-o", "-", "--resume"), "stdout has nothing to overwrite"),
        (("-i", "-", "-o", "/dev/null/a.jsonl"), "--output /dev/null/a.jsonl can't be written"),
    ],
)
def test_files_that_cant_be(
    penstock: Run, engine: Path, options: tuple[str, ...], words: str
) -> None:
    result = penstock("run", engine, *options)
    assert result.exit_code == 1 and words in result.stderr


def test_an_empty_path_names_nothing(penstock: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """A variable that isn't set: it would be the folder that the program runs in."""
    monkeypatch.chdir(tmp_path)
    result = penstock("generate", "-p", "x", "--prefix-cache-dir", "")
    assert result.exit_code == 2 and "--prefix-cache-dir" in result.stderr
    for option, other in (("--input", "--output"), ("--output", "--input")):
        result = penstock("run", "stories", option, "", other, "-")
        assert result.exit_code == 1 and f"{option} is empty" in result.stderr
    assert not list(tmp_path.iterdir())

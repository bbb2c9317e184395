"""The command: its files, its one-line errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import FakeServer
from typer.testing import CliRunner, Result

from penstock.cli.main import app

Fake = Callable[..., FakeServer]
SMALL = ("--num-prompts", "6", "--input-len", "10", "--output-len", "3")
TRACE = ("--dataset-name", "azure", "--dataset-path", "trace.csv")


def serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def test_everything_is_shown_and_kept(fake: Fake, tmp_path: Path) -> None:
    server = fake(itl_s=0.01)
    kept, page = tmp_path / "new" / "serve.json", tmp_path / "serve.html"
    result = serve(
        "--base-url", server.url + "/v1", *SMALL, "--max-concurrency", 2, "--goodput", "chat",
        "--metric-percentiles", "50,95", "--percentile-metrics", "ttft,itl", "--json", kept,
        "--save-detailed", "--html", page, "--seed", 3,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("6 answered", "closed loop of 2", "TTFT", "ITL", "P95", "goodput", "Client"):
        assert words in result.stdout
    assert "TPOT" not in result.stdout and "6/6 done" in result.stderr
    found = json.loads(kept.read_text())
    assert found["benchmark"] == "serve" and found["partial"] is False
    assert found["results"]["output_tokens"] == 18 and found["results"]["ttft_s"]["p95"] > 0
    assert found["setup"]["workload"]["seed"] == 3 and found["hardware"]["cores"] > 0
    assert {"penstock", "python"} <= set(found["versions"]) and "commit" in found
    assert len(found["requests"]) == 6
    assert all(len(r["token_times_s"]) == 3 for r in found["requests"])
    assert page.read_text().count("<svg") == 4
    plain = serve("--base-url", server.url, *SMALL, "--save-result", kept)
    assert plain.exit_code == 0 and "requests" not in json.loads(kept.read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "localhost:8000"], "http://127.0.0.1:8000"),
        (["--base-url", "http://h:99999"], "can't be read"),
        (["--base-url", "http://127.0.0.1:1"], "Is the server running"),
        (["--base-url", "http://no-such-host.invalid"], "no-such-host.invalid"),
        (["--backend", "vllm"], "openai, openai-chat"),
        (["--dataset-name", "azur"], "Did you mean 'azure'"),
        (["--dataset-name", "azure"], "--dataset-path"),
        (["--dataset-path", "x.csv"], "means nothing to"),
        (["--dataset-name", "sharegpt"], "sharegpt needs --dataset-path FILE"),
        (["--dataset-name", "custom", "--dataset-path", "no/file.jsonl"], "No such file"),
        (["--custom-output-len", "3"], "it is for sharegpt or custom"),
        (["--dataset-name", "azure", "--dataset-path", "no/file.csv"], "No such file"),
        (["--dataset-name", "mooncake", "--dataset-path", "."], "directory"),
        (["--request-rate", "0"], "above 0"),
        (["--request-rate", "nan"], "above 0"),
        (["--burstiness", "2"], "--request-rate"),
        (["--burstiness", "1"], "--request-rate"),
        (["--time-scale", "2"], "it is for azure or mooncake"),
        (["--block-tokens", "16"], "mooncake"),
        (["--num-groups", "3"], "--num-groups means nothing to --dataset-name random"),
        (["--prefix-len", "3"], "it is for shared-prefix"),
        (["--suffix-len", "3"], "it is for shared-prefix"),
        (["--think-time", "3"], "--think-time means nothing to --dataset-name random"),
        (["--num-turns", "3", "--dataset-name", "shared-prefix"], "it is for multi-turn"),
        (["--num-turns", "4"], "it is for multi-turn"),  # its default, given
        (["--think-time", "1"], "it is for multi-turn"),
        (["--block-tokens", "512"], "it is for mooncake"),
        (["--input-len", "512", "--dataset-name", "shared-prefix"], "--random-input-len means"),
        ([*TRACE, "--random-input-len", "512"], "it is for random or multi-turn"),
        ([*TRACE, "--output-len", "128"], "--random-output-len means nothing to"),
        ([*TRACE, "--random-range-ratio", "0"], "--random-range-ratio means nothing to"),
        ([*TRACE, "--time-scale", "1", "--request-rate", "2"], "--request-rate replaces"),
        (["--long-prompts", "drop"], "--max-input-len: give that too"),
        (["--long-prompts", "cut"], "--max-input-len: give that too"),
        (
            ["--dataset-name", "multi-turn", "--long-prompts", "cut", "--max-input-len", "9"],
            "always left out whole",
        ),
        (["--vocab-size", "9", "--prompt-form", "text"], "--vocab-size draws token ids"),
        (["--vocab-size", "9", "--backend", "openai-chat"], "--vocab-size draws token ids"),
        (["--random-range-ratio", "1"], "[0, 1)"),
        (["--goodput", "ttft:x"], "ttft:MS"),
        (["--metric-percentiles", "50;90"], "50,90,99"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--percentile-metrics", "ttfx"], "Did you mean 'ttft'"),
        (["--extra-body", "{"], "isn't JSON"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--save-detailed"], "--json"),
        (["--json", "/proc/no/file.json"], "/proc/no"),
        (["--html", "/proc/no.html"], "/proc/no.html"),
        (["--backend", "openai-chat", "--prompt-form", "ids"], "openai-chat"),
        (["--dataset-name", "multi-turn", "--prompt-form", "ids"], "text"),
        (["--request-timeout", "0"], "above 0"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    result = serve(*arguments)
    assert result.exit_code == 1 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_run_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    assert serve("--base-url", "http://127.0.0.1:1", "--json", old).exit_code == 1
    assert serve("--base-url", "http://127.0.0.1:1", "--html", tmp_path / "new").exit_code == 1
    assert old.read_text() == "kept" and [*tmp_path.iterdir()] == [old]


def test_no_answer_at_all_is_an_error(fake: Fake, tmp_path: Path) -> None:
    server = fake(faults=dict.fromkeys(range(6), "503"))
    result = serve("--base-url", server.url, *SMALL, "--html", tmp_path / "page.html")
    assert result.exit_code == 1 and "No request was answered" in result.stderr
    assert "HTTP 503: overloaded" in result.stderr and "6 failed" in result.stdout


def test_a_starting_server_is_waited_for(fake: Fake) -> None:
    before = time.monotonic()
    result = serve("--base-url", "http://127.0.0.1:1", "--ready-timeout", "0.4")
    assert result.exit_code == 1 and time.monotonic() - before >= 0.4


def test_an_interrupt_leaves_the_figures_so_far(fake: Fake, tmp_path: Path) -> None:
    server = fake(ttft_s=0.1, itl_s=0.01)
    kept = tmp_path / "serve.json"
    command = [
        sys.executable, "-c", "from penstock.cli.main import run; run()", "bench", "serve",
        "--base-url", server.url, "--num-prompts", "5000", "--input-len", "8", "--output-len", "8",
        "--max-concurrency", "2", "--json", str(kept), "--save-detailed",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while len(server.measured) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "PARTIAL" in out and "not sent" in out and "Traceback" not in err
    found = json.loads(kept.read_text())
    results = found["results"]
    assert found["partial"] is True and results["completed"] >= 4 and results["failed"] == 0
    assert results["completed"] + results["unfinished"] + results["not_sent"] == 5000
    assert len(found["requests"]) == results["completed"] + results["unfinished"]

"""`penstock generate`: text that can be piped, JSON, figures, and Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import Result

from penstock import LLM, SamplingParams
from penstock.cli import console
from penstock.hardware import Peaks
from penstock.roofline import CAUSES

Run = Callable[..., Result]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "stories260K"


def read_json(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_stdout_is_the_text(penstock: Run, base_model: Path) -> None:
    """The streamed pieces join to what the Python interface gives."""
    result = penstock("generate", base_model, "-p", "hello", "--temperature", 0)
    params = SamplingParams(temperature=0, max_tokens=128)
    (expected,) = LLM(base_model).generate("hello", params)
    text = expected.outputs[0].text
    assert len(expected.outputs[0].token_ids) == 128
    assert result.stdout == (text if text.endswith("\n") else text + "\n")
    assert result.stderr == ""


def test_ranks_that_share_the_text(penstock: Run, base_model: Path) -> None:
    greedy = ("generate", base_model, "-p", "hello", "--temperature", 0, "--max-tokens", 20)
    alone, *shared = (
        penstock(*greedy, *option) for option in ((), ("-cp", 2), ("--context-parallel-size", 2))
    )
    assert all(each.stdout == alone.stdout and each.exit_code == 0 for each in shared)
    refused = penstock(*greedy, "-cp", 2, "-tp", 2)
    assert refused.exit_code == 1
    assert "isn't built: ranks share the tokens of a sequence or the weights" in " ".join(
        refused.stderr.split()
    )


@pytest.mark.skipif(not (SHARED / "hf").exists(), reason=f"{SHARED} isn't on this machine")
def test_a_real_model(penstock: Run) -> None:
    expected = (SHARED / "expected_greedy_200steps.txt").read_text()
    prompt = "Once upon a time"
    assert expected.startswith(prompt)
    result = penstock("generate", SHARED / "hf", "-p", prompt, "--temperature", 0)
    assert result.exit_code == 0
    assert len(result.stdout) > 200
    assert expected.startswith(prompt + result.stdout.removesuffix("\n"))


def test_stdin_is_a_prompt(penstock: Run, base_model: Path) -> None:
    greedy = ("--temperature", 0, "--max-tokens", 8, "--json")
    (piped,) = read_json(penstock("generate", base_model, "-p", "-", *greedy, stdin="two\nlines\n"))
    (given,) = read_json(penstock("generate", base_model, "-p", "two\nlines", *greedy))
    assert piped["prompt"] == "two\nlines"
    assert piped["token_ids"] == given["token_ids"]


def test_json_of_several_prompts_and_samples(penstock: Run, base_model: Path) -> None:
    options = ("--n", 2, "--seed", 1, "--max-tokens", 5, "--json")
    found = read_json(penstock("generate", base_model, "-p", "one", "-p", "two", *options))
    assert [(f["prompt"], f["index"]) for f in found] == [
        ("one", 0), ("one", 1), ("two", 0), ("two", 1)
    ]  # fmt: skip
    assert all(len(f["token_ids"]) == 5 and f["finish_reason"] == "length" for f in found)
    assert found[0]["token_ids"] != found[1]["token_ids"]
    again = read_json(penstock("generate", base_model, "-p", "one", *options))
    assert [f["token_ids"] for f in again] == [f["token_ids"] for f in found[:2]]


def test_json_has_the_share_of_the_floor(
    penstock: Run, base_model: Path, known_peaks: Peaks
) -> None:
    options = ("--temperature", 0, "--max-tokens", 9, "--json")
    (found,) = read_json(penstock("generate", base_model, "-p", "AN UPPER CASE PROMPT", *options))
    metrics = found["metrics"]
    assert metrics["prompt_tokens"] == 20
    assert 0 < metrics["ttft_s"] <= metrics["e2e_s"]
    prefill, decode = metrics["prefill"], metrics["decode"]
    assert (prefill["steps"], prefill["tokens"]) == (1, 20)
    assert (decode["steps"], decode["tokens"]) == (8, 8)
    # 2 layers of (128·64 + 64·64 + 256·64 + 64·128) weights, a head of 512·64, in 2 bytes;
    # keys and values of 2 layers, 2 heads of 16: contexts of 21 to 28, read and the last written
    weights = 2 * (2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 512 * 64)
    kv = sum(2 * 2 * 2 * 16 * 2 * (context + 1) for context in range(21, 29))
    assert decode["bytes_moved"] == 8 * weights + kv
    floor = decode["bytes_moved"] / known_peaks.read_bytes_per_s
    assert decode["floor_s"] == pytest.approx(floor)
    assert decode["share_of_floor"] == pytest.approx(floor / decode["seconds"])
    assert decode["bound"] == "memory"
    assert set(decode["lost_s"]) == set(CAUSES)
    whole = prefill["floor_s"] + decode["floor_s"]
    assert metrics["floor_s"] == pytest.approx(whole)
    assert metrics["achieved"] == pytest.approx(whole / (prefill["seconds"] + decode["seconds"]))
    assert metrics["bound"] == "memory"


def test_stats_go_to_stderr(penstock: Run, base_model: Path) -> None:
    options = ("--temperature", 0, "--max-tokens", 9)
    plain = penstock("generate", base_model, "-p", "hello", *options)
    result = penstock("generate", base_model, "-p", "hello", *options, "--stats")
    assert result.stdout == plain.stdout
    for word in ("generated 9 tokens", "prefill", "decode", "tok/s", "% of the hardware floor",
                 "memory-bound", "outside the forward pass (schedule", "first token after",
                 "bfloat16 weights", "1 thread"):  # fmt: skip
        assert word in result.stderr


def test_stats_of_drafts(penstock: Run, base_model: Path) -> None:
    """By a model that is the target itself, every guess is right."""
    asked = {"model": str(base_model), "num_speculative_tokens": 3, "adaptive": False}
    options = ("-p", "hello", "--temperature", 0, "--max-tokens", 13, "--speculative-config")
    shown = penstock("generate", base_model, *options, json.dumps(asked), "--stats")
    line = next(one for one in shown.stderr.splitlines() if one.startswith("drafts"))
    assert line == (
        "drafts     draft_model, always; 9 of 9 tokens accepted (100%) in 3 drafts, "
        "4.00 tokens a verified draft; by position 100%, 100%, 100%"
    )
    (told,) = read_json(penstock("generate", base_model, *options, json.dumps(asked), "--json"))
    assert told["metrics"]["drafts"] == {
        "method": "draft_model", "drafts": 3, "draft_tokens": 9, "accepted_tokens": 9,
        "acceptance_rate": 1.0, "accepted_per_position": [3, 3, 3], "mean_acceptance_length": 4.0,
        "adaptive": False, "on": True, "failed": None,
    }  # fmt: skip
    (plain,) = read_json(penstock("generate", base_model, *options[:-1], "--json"))
    assert "drafts" not in plain["metrics"] and plain["token_ids"] == told["token_ids"]


def test_stats_of_a_controller(penstock: Run, base_model: Path) -> None:
    asked = json.dumps({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5})
    options = ("-p", "hello", "--max-tokens", 2, "--stats", "--speculative-config", asked)
    shown = penstock("generate", base_model, *options).stderr
    assert "drafts     ngram, on; none was verified" in shown


def test_the_checkpoints_own_sampling_is_the_default(
    penstock: Run, chat_model: Path, base_model: Path
) -> None:
    options = ("-p", "hello", "--max-tokens", 12)
    greedy = penstock("generate", base_model, *options, "--temperature", 0)
    suggestion = chat_model / "generation_config.json"
    suggestion.write_text('{"do_sample": false}')
    try:
        assert penstock("generate", chat_model, *options).stdout == greedy.stdout
        sampled = penstock("generate", chat_model, *options, "--temperature", 5, "--seed", 1)
        assert sampled.stdout != greedy.stdout
        suggestion.write_text('{"top_p": 5}')
        wrong = penstock("generate", chat_model, *options)
        assert wrong.exit_code == 1 and "generation_config.json can't be followed" in wrong.stderr
    finally:
        suggestion.unlink()


def test_stop_and_float32(penstock: Run, base_model: Path) -> None:
    options = ("--temperature", 0, "--max-tokens", 64, "--dtype", "float32", "--json")
    (whole,) = read_json(penstock("generate", base_model, "-p", "hello", *options))
    stop = whole["text"][10:12]
    (cut,) = read_json(penstock("generate", base_model, "-p", "hello", *options, "--stop", stop))
    assert cut["text"] == whole["text"].partition(stop)[0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["metrics"]["weights"] == "float32"


def test_ctrl_c_ends_it_with_a_note(
    process: Callable[..., subprocess.Popen[bytes]], base_model: Path
) -> None:
    running = process("generate", base_model, "-p", "hello", "--max-tokens", 2000)
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == b"Stopped.\n"


def test_a_reader_that_leaves_is_no_error(
    process: Callable[..., subprocess.Popen[bytes]], base_model: Path
) -> None:
    running = process("generate", base_model, "-p", "hello", "--max-tokens", 2000)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.wait(timeout=60) == 141
    assert running.stderr.read() == b""
    running.stdout = None


def test_a_terminal_gets_no_control_characters() -> None:
    assert console.printable("a\x1b[2Jb\tc\n\u200d👩") == "a\ufffd[2Jb\tc\n\u200d👩"
    assert console.one_line("a\n  b\x07") == "a b\ufffd"


GUESSING = ("--speculative-config", '{"method": "ngram", "adaptive": false}')


def test_what_went_wrong_is_told_once(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base_model, tmp_path / "broken")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][0] = float("nan")
            save_file(tensors, file, {"format": "pt"})
    result = penstock("generate", folder, "-p", "a", "--max-tokens", 2)
    assert result.exit_code == 1
    assert result.stderr.count("a NaN, so no token can be chosen") == 1
    assert result.stderr.count("model.norm.weight") == 1


def test_what_is_expected_is_guessed(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    options = ("-p", "hello", "--temperature", 0, "--max-tokens", 40, "--json")
    (plain,) = read_json(penstock("generate", base_model, *options))
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"], encoding="utf-8")
    asked = (*options, *GUESSING, "--prediction", file)
    (found,) = read_json(penstock("generate", base_model, *asked))
    assert found["token_ids"] == plain["token_ids"]
    (without,) = read_json(penstock("generate", base_model, *options, *GUESSING))
    accepted = [one["metrics"]["drafts"]["accepted_tokens"] for one in (found, without)]
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, GUESSING, "can't be read: No such file"),
        (b"\xff", GUESSING, "isn't UTF-8 text"),
        (b"", GUESSING, "prediction is empty"),
        (b"text", (), "prediction has no effect: there are no drafts here"),
    ],
)
def test_what_cant_be_expected(
    penstock: Run,
    base_model: Path,
    tmp_path: Path,
    content: bytes | None,
    options: tuple[str, ...],
    words: str,
) -> None:
    file = tmp_path / "expected.txt"
    if content is not None:
        file.write_bytes(content)
    result = penstock("generate", base_model, "-p", "hello", *options, "--prediction", file)
    assert result.exit_code == 1 and words in result.stderr
    assert result.stdout == "" and result.stderr.count("\n") == 1

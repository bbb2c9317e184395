"""Help, version, and what becomes of errors: one line, an exit code, no traceback."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import penstock as package

Run = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]


def refused(result: Result, code: int, *words: str) -> None:
    """The command failed with `code` and one line on stderr that has all of `words`."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_alone_it_welcomes(penstock: Run) -> None:
    result = penstock()
    assert result.exit_code == 0
    for command in ("penstock generate -p", "penstock chat", "penstock doctor", "--help"):
        assert command in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 80


def test_version(penstock: Run) -> None:
    assert penstock("--version").stdout == f"penstock {package.__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["", "generate", "chat", "export", "doctor", "bench", "bench latency", "bench throughput"],
)
def test_help(penstock: Run, command: str) -> None:
    result = penstock(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == f"penstock {package.__version__}"


def test_help_needs_nothing_heavy() -> None:
    """What makes `--help` quick, told by its imports: seconds depend on what else is running."""
    code = (
        "import sys; sys.argv = ['penstock', '--help']\n"
        "from penstock.cli.main import run\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'safetensors', 'jinja2'}\n"
        "try: run()\n"
        "finally: assert not heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate"], 2, ["--prompt", "penstock generate --help"]),
        (["genrate"], 2, ["genrate", "'generate'"]),
        (["generate", "-p", "a", "--temprature", "1"], 2, ["--temprature", "--temperature"]),
        (["generate", "-p", "a", "--max-tokens", "many"], 2, ["--max-tokens", "integer"]),
        (["generate", "-p", "-", "-p", "-"], 2, ["stdin"]),
        (["bench", "latency", "--input-len", "0"], 2, ["--input-len"]),
        (["generate", "-p", "a", "--temperature", "nan"], 1, ["temperature is nan"]),
        (["generate", "-p", "a", "--max-tokens", "0"], 1, ["max_tokens is 0", "as many as fit"]),
        (["generate", "-p", "a", "--seed", str(-(1 << 64))], 1, ["seed is -", "give -1"]),
        (["generate", "-p", "a", "--top-p", "0"], 1, ["top_p is 0.0"]),
        (["generate", "-p", "a", "--n", "2", "--temperature", "0"], 1, ["n is 2"]),
        (["generate", "-p", "a", "--stop", ""], 1, ["stop[0] is an empty string"]),
        (["generate", "-p", "a", "--dtype", "float15"], 1, ["'float15'"]),
        (["generate", "/no/such/folder", "-p", "a"], 1, ["/no/such/folder"]),
        (["chat", "/no/such/folder"], 1, ["/no/such/folder"]),
        (["chat", "--temperature", "-1"], 1, ["temperature is -1.0"]),
        (["bench", "latency", "/no/such/folder"], 1, ["/no/such/folder"]),
        (["bench", "latency", "--json", "/proc/a.json"], 1, ["--json /proc/a.json can't be"]),
        (["bench", "speculate", "--draw", "/dev/null/a.svg"], 1, ["--draw /dev/null/a.svg can't"]),
        (["profile", "--svg", "."], 1, ["--svg . is a folder"]),
        (["profile", "--trace", "/proc/a/b"], 1, ["--trace /proc/a/b can't be written"]),
        (["tune", "--json", "/proc/a.json"], 1, ["--json /proc/a.json can't be written"]),
        (["eval", "--json", "."], 1, ["--json . is a folder"]),
        (["drift", "stories", "--svg", "/proc/a", "--text", "README.md"], 1, ["--svg /proc/a can"]),
        (["eval", "-tp", "2"], 2, ["No such option: -tp. These have it: bench latency, ", "tune"]),
        (["plan", "-cp=2"], 2, ["No such option: -cp. These have it: ", "serve, ", "plan --help"]),
        (["doctor", "--json", "-pp", "2"], 2, ["No such option: -pp. ", "chat, generate, plan, "]),
        (["doctor", "-x"], 2, ["No such option: -x. See penstock doctor --help"]),
    ],
)
def test_refusals(penstock: Run, arguments: list[str], code: int, words: list[str]) -> None:
    refused(penstock(*arguments), code, *words)


def test_a_warning_is_one_line(tmp_path: Path, base_model: Path, process: Start) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "frobnicate": 7}))
    running = process("generate", folder, "-p", "a", "--max-tokens", "1")
    _, said = running.communicate(timeout=120)
    (line,) = [line for line in said.decode().splitlines() if "frobnicate" in line]
    assert line.startswith("warning: ") and ".py" not in said.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "stories", "--neurons", "0.25", "--steps", "100000", "--calib", "TEXT"],
        ["build", "stories"],
        ["export", "stories", "--quant", "w4a16", "--method", "gptq", "--calib", "TEXT"],
    ],
    ids=lambda words: words[0],
)
def test_asked_to_end_they_leave_nothing(
    tmp_path: Path, process: Start, arguments: list[str]
) -> None:
    text, place = tmp_path / "text.txt", tmp_path / "place"
    text.write_text("Once upon a time, there was a little dog named Max. " * 2000)
    place.mkdir()
    given = [str(text) if word == "TEXT" else word for word in arguments]
    running = process(*given, "-o", place / "new")
    until = time.monotonic() + 60
    while not any(place.glob("*.partial")) and running.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    running.terminate()
    _, said = running.communicate(timeout=60)
    assert running.returncode == 143, said.decode()
    assert said.decode().splitlines()[-1] == "Stopped."
    left = [path for path in place.iterdir() if path.suffix != ".work"]  # an export goes on there
    assert left == []


def test_bad_prompts(penstock: Run, base_model: Path) -> None:
    refused(penstock("generate", base_model, "-p", ""), 1, "prompt is empty")
    refused(penstock("generate", base_model, "-p", "a", "-p", ""), 1, "Prompt 2 of 2", "empty")
    refused(penstock("generate", base_model, "-p", "X" * 3000), 1, "3000 tokens", "2048")
    refused(penstock("generate", base_model, "-p", "-", stdin=b"\xff"), 1, "0xff", "UTF-8")
    refused(
        penstock("generate", base_model, "-p", "a", "--max-model-len", "4096"), 1, "4096", "2048"
    )


def test_corrupt_checkpoints(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model, folder)
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(penstock("generate", folder, "-p", "a"), 1, weights.name)
    weights.unlink()
    refused(penstock("generate", folder, "-p", "a"), 1, weights.name)
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    refused(penstock("generate", folder, "-p", "a"), 1, "NoSuchForCausalLM")
    (folder / "config.json").write_text("{")
    refused(penstock("generate", folder, "-p", "a"), 1, "config.json", "JSON")
    (folder / "config.json").unlink()
    refused(penstock("generate", folder, "-p", "a"), 1, "config.json")


def test_an_error_has_no_traceback_unless_debugging(
    process: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", "-p", "a", "--temperature", "nan")
    quiet = process(*arguments)
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    debugging = process(*arguments)
    out, err = quiet.communicate(timeout=60)
    assert (quiet.returncode, out) == (1, b"")
    assert err.startswith(b"error: temperature is nan") and b"Traceback" not in err
    _, err = debugging.communicate(timeout=60)
    assert debugging.returncode == 1
    assert b"Traceback" in err and b"InvalidSamplingError" in err


@pytest.mark.parametrize(("command", "rarely"), [("generate", True), ("export", False)])
def test_garbage_is_collected_rarely_where_a_model_is_loaded(
    penstock: Run, command: str, rarely: bool
) -> None:
    usual = gc.get_threshold()
    assert penstock(command, "--help").exit_code == 0
    assert (gc.get_threshold() != usual) == rarely


@pytest.mark.parametrize("error", [MemoryError("3 GiB"), RuntimeError("you can't allocate memory")])
def test_out_of_memory(penstock: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(config: object) -> None:
        raise error

    monkeypatch.setattr("penstock.cli.generate.load", load)
    refused(penstock("generate", "-p", "a"), 1, "Out of memory", str(error), "--max-model-len")


def test_a_bug_keeps_its_traceback(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("penstock.cli.generate.load", load)
    assert isinstance(penstock("generate", "-p", "a").exception, RuntimeError)


def test_a_file_that_cannot_be_written(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "/proc/figures.json")

    monkeypatch.setattr("penstock.cli.doctor.diagnose", lambda calibrate: fail())
    refused(penstock("doctor"), 1, "/proc/figures.json")

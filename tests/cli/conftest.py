"""A tiny random model with a tokenizer of its own, and ways to run the command."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from penstock import LLM
from penstock.cli.main import app
from penstock.hardware import Peaks, detect, save_peaks
from penstock.kernels import native

ROOT = Path(__file__).resolve().parents[2]
PENSTOCK = [sys.executable, "-c", "from penstock.cli.main import run; run()"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="session", autouse=True)
def known_peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peaks]:
    """Peaks in a cache of the tests' own: nothing is measured, nothing of the user's is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        peaks = Peaks(2e10, 1e11, 0.0, torch.get_num_threads(), "2026-11-21T00:00:00+00:00")
        save_peaks(detect(), peaks, "native" if native.handle else "reference")
        module = importlib.import_module("penstock.roofline.peaks")
        patch.setattr(module, "measure", lambda hardware, *, repeats=5: peaks)
        yield peaks


@pytest.fixture(autouse=True)
def _quiet_logger() -> Iterator[None]:
    yield
    logger = logging.getLogger("penstock")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 tokens: all bytes and pairs of letters. No end token, no chat template."""
    spec = importlib.util.spec_from_file_location(
        "make_checkpoint", ROOT / "benchmarks" / "make_checkpoint.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("base")
    module.write_checkpoint("tiny", folder)
    pairs = [*product(ascii_lowercase, repeat=2)][:256]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def chat_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(base_model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def penstock() -> Callable[..., Result]:
    """Run the command in this process."""

    def invoke(*arguments: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)

    return invoke


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the command as a process of its own; ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*PENSTOCK, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = subprocess.Popen(command, env=environment, **{**pipes, **options})  # type: ignore[call-overload]
        started.append(running)
        return running

    yield start
    for running in started:
        if running.poll() is None:
            running.kill()
        running.communicate()


@pytest.fixture(scope="session")
def engine(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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

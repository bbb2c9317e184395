"""Exports in forked children and kills each at another of its messages; run by test_resume.py.

    python killed_export.py FOLDER CASE        FOLDER has model/, text.txt, adapter/

Writes FOLDER/whole, never interrupted, and FOLDER/resumed; prints the messages of the last run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.pipeline.export import export_model
from penstock.pipeline.method_options import MethodOptions
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice

Say = Callable[[str, int, int], None]

MIDDLE = ("trying 6/", "quantizing 2/", "training 15/")


def choices(folder: Path, case: str) -> dict[str, Any]:
    fitted = {"calib": (folder / "text.txt",), "num_samples": 4, "window": 32}
    adapter = folder / "adapter"
    few = VocabularyChoice.parse("1500", (folder / "text.txt",))
    cases: dict[str, dict[str, Any]] = {
        "adapter": {"weights": NewWeights("w4a16-g64", merge_lora=adapter, **fitted)},
        "training": {
            "weights": NewWeights("w4a16-g64", "qat", MethodOptions(steps=20), **fitted),
            "reduce_vocab": few,
        },
        "all": {
            "weights": NewWeights(budget="6bpw", merge_lora=adapter, method="awq+gptq", **fitted),
            "reduce_vocab": few,
        },
    }
    return cases[case]


def child(folder: Path, name: str, case: str, say: Say) -> int:
    """An export in a process of its own; the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            export_model(folder / "model", folder / name, progress=say, **choices(folder, case))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status)


def line(what: str, done: int, total: int) -> str:
    """A message as its phase and how far that is."""
    return f"{what.split(maxsplit=1)[0].rstrip(',')} {done}/{total}"


def killed_at(message: str) -> Say:
    """Ends the process by SIGKILL when it says that."""

    def say(what: str, done: int, total: int) -> None:
        if line(what, done, total) == message:
            os.kill(os.getpid(), signal.SIGKILL)

    return say


def stops(messages: list[str]) -> list[str]:
    """The first message of each phase, and one in the middle of those that take long."""
    found: dict[str, str] = {}
    for message in messages:
        phase = message if message.startswith(MIDDLE) else message.split()[0]
        found.setdefault(phase, message)
    return list(found.values())


def export(folder: Path, name: str, case: str) -> list[str]:
    """One that isn't interrupted; its messages."""
    log = folder / f"{name}.said"
    with log.open("w") as file:
        say = child(folder, name, case, lambda *at: print(line(*at), file=file, flush=True))
    assert say == 0
    return log.read_text().splitlines()


def main(folder: Path, case: str) -> None:
    for message in stops(export(folder, "whole", case)):
        assert child(folder, "resumed", case, killed_at(message)) == signal.SIGKILL, message
        assert not (folder / "resumed").exists()
    print("\n".join(export(folder, "resumed", case)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])

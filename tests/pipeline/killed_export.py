"""Exports in forked children and kills each at another of its messages; run by test_resume.py.

    python killed_export.py FOLDER CASE        FOLDER has text.txt and adapter/

Writes FOLDER/whole, never interrupted, and FOLDER/resumed; prints the messages of the last run.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice

Say = Callable[[str], None]

MIDDLE = ("trying matrix 13 of", "layer 4 of", "training: 60 of")


def choices(folder: Path, case: str) -> dict[str, Any]:
    fitted = {"calib": (folder / "text.txt",), "num_samples": 4, "window": 32}
    adapter = folder / "adapter"
    few = VocabularyChoice.parse("1500", (folder / "text.txt",))
    cases: dict[str, dict[str, Any]] = {
        "adapter": {"weights": NewWeights("w4a16-g64", merge_lora=adapter, **fitted)},
        "training": {"weights": NewWeights("w4a16-g64", "qat", **fitted), "reduce_vocab": few},
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
            export_model("stories", folder / name, progress=say, **choices(folder, case))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status)


def killed_at(message: str) -> Say:
    """Ends the process by SIGKILL when it says that."""

    def say(what: str) -> None:
        if what.startswith(message):
            os.kill(os.getpid(), signal.SIGKILL)

    return say


def stops(messages: list[str]) -> list[str]:
    """How the first message of each phase begins, and one in the middle of those that take long."""
    found: list[str] = []
    seen: set[str] = set()
    for message in messages:
        phase = message.split()[0]
        if phase not in seen or any(message.startswith(start) for start in MIDDLE):
            seen.add(phase)
            found.append(re.split(r"(?<= of) ", message)[0])
    return found


def main(folder: Path, case: str) -> None:
    log = folder / "said"
    with log.open("w") as file:
        assert child(folder, "whole", case, lambda what: print(what, file=file, flush=True)) == 0
    messages = log.read_text().splitlines()
    for message in stops(messages):
        assert child(folder, "resumed", case, killed_at(message)) == signal.SIGKILL, message
        assert not (folder / "resumed").exists()
    said = folder / "last"
    with said.open("w") as file:
        assert child(folder, "resumed", case, lambda what: print(what, file=file, flush=True)) == 0
    print(said.read_text(), end="")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])

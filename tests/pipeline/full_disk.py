"""Exports and builds onto file systems that are too small; run by test_full_disk.py as root of a
user namespace of its own.

    python full_disk.py MOUNT TEXT MODEL

Prints a line of JSON an attempt: what, its share of the room that it needs, how it ended, what lay
there afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.errors import PenstockError
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice

SHARES = (10, 50, 95)  # percent


def mount(folder: Path, size: int, *options: str) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "full", folder],
        check=True,
    )


def used(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def attempt(what: str, share: int, folder: Path, run: Callable[[], object]) -> None:
    ended = "done"
    try:
        run()
    except PenstockError as error:
        ended = f"{type(error).__name__}: {error}"
    left = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"what": what, "share": share, "ended": ended, "left": left}), flush=True)


def main(folder: Path, text: Path, model: Path) -> None:
    output = folder / "out"
    fitted = NewWeights("w4a16-g64", calib=(text,), num_samples=2, window=32)
    few = VocabularyChoice.parse("1500", (text,))
    ways: dict[str, tuple[Callable[[], object], float]] = {
        "plain": (lambda: export_model(model, output), 1.0),
        "fitted": (lambda: export_model(model, output, weights=fitted), 1.2),  # and its work
        "vocabulary": (lambda: export_model(model, output, reduce_vocab=few), 1.9),  # twice
        "build": (lambda: build(BuildOptions(model, output, profile=(1, 8, 64),
                                             max_num_seqs=4)), 1.0),
    }  # fmt: skip
    for what, (run, times) in ways.items():
        mount(folder, 1 << 30)
        run()
        need = int(used(folder) * times)
        subprocess.run(["umount", "-l", folder], check=True)
        for share in SHARES:
            mount(folder, need * share // 100)
            attempt(what, share, folder, run)
            if what == "fitted" and share == SHARES[-2]:  # on the same disk, with more room
                mount(folder, 4 * need, "remount")
                attempt("resumed", share, folder, run)
            subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))

"""Builds an engine in forked children and kills each at a random moment; run by test_build.py.

    python killed_build.py MODEL FOLDER ROUNDS

The first half of the rounds has nothing standing there, the second an engine. Each half has a round
in every part of a build's time. Prints one word a round: `none`, `old` or `new`, what was there to
load afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from penstock.pipeline import tuning
from penstock.pipeline.build import BuildOptions, build
from penstock.runtime.engine_folder import EngineFolder

OLD, NEW = 8, 9


def options(model: Path, output: Path, seqs: int) -> BuildOptions:
    return BuildOptions(
        model=model, output=output, profile=(1, 8, 64), max_num_seqs=seqs, force=True
    )


def child(model: Path, output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            build(options(model, output, NEW))
            code = 0
        finally:
            os._exit(code)
    return pid


def main(model: Path, folder: Path, rounds: int) -> None:
    build(options(model, folder / "first", NEW))  # its imports and timings are there from then on
    start = time.perf_counter()
    pid = child(model, folder / "second")
    assert os.waitpid(pid, 0)[1] == 0
    whole = time.perf_counter() - start
    for standing in (False, True):
        kill(model, folder / str(standing), rounds // 2, standing, whole)


def kill(model: Path, folder: Path, rounds: int, standing: bool, whole: float) -> None:
    folder.mkdir()
    output = folder / "engine"
    if standing:
        build(options(model, output, OLD))
    for part in range(rounds):
        pid = child(model, output)
        time.sleep((part + random.random()) / rounds * 1.1 * whole)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not output.exists():
            print("none")
            continue
        found = EngineFolder.open(output, verify=True)
        print("old" if found.limits.max_num_seqs == OLD else "new")
        if not standing:
            for path in output.iterdir():
                path.unlink()
            output.rmdir()
    pid = child(model, output)  # whatever was left lying about is no hindrance
    assert os.waitpid(pid, 0)[1] == 0
    assert EngineFolder.open(output, verify=True).limits.max_num_seqs == NEW
    left = {path.name for path in folder.iterdir()} - {"engine"}
    assert left == set(), left


if __name__ == "__main__":
    torch.set_num_threads(1)
    tuning.waited_s = lambda: 0.0  # as on an idle machine: what was timed once is kept
    tuning._ENOUGH_S, tuning._MOST_RUNS = 0.0, 2
    random.seed(int(time.time_ns()))
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

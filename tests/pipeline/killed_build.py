"""Builds an engine in forked children and kills each at a random moment; run by test_build.py.

    python killed_build.py FOLDER ROUNDS [--engine]      --engine: one stands there already

Prints one word a round: `none`, `old` or `new`, what was there to load afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from penstock.pipeline.build import BuildOptions, build
from penstock.runtime.engine_folder import EngineFolder

OLD, NEW = 8, 9


def options(output: Path, seqs: int) -> BuildOptions:
    return BuildOptions(
        model="stories", output=output, profile=(1, 8, 64), max_num_seqs=seqs, force=True
    )


def child(output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            build(options(output, NEW))
            code = 0
        finally:
            os._exit(code)
    return pid


def main(folder: Path, rounds: int, standing: bool) -> None:
    output = folder / "engine"
    build(options(folder / "first", NEW))  # its imports and timings are there from then on
    start = time.perf_counter()
    pid = child(folder / "second")
    assert os.waitpid(pid, 0)[1] == 0
    whole = time.perf_counter() - start
    if standing:
        build(options(output, OLD))
    for _ in range(rounds):
        pid = child(output)
        time.sleep(random.uniform(0, 1.1 * whole))
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
    pid = child(output)  # whatever was left lying about is no hindrance
    assert os.waitpid(pid, 0)[1] == 0
    assert EngineFolder.open(output, verify=True).limits.max_num_seqs == NEW
    left = {path.name for path in folder.iterdir()} - {"engine", "first", "second"}
    assert left == set(), left


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(int(time.time_ns()))
    main(Path(sys.argv[1]), int(sys.argv[2]), "--engine" in sys.argv)

"""Compiles what launchers start for a GPU that isn't here; run in a process of its own.

A driver that only knows its target stands in for the GPU's, and starting a kernel becomes compiling
it, specialised as it would be there: the arguments are the launcher's own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Callable[[], Any]) -> list[Any]:
    """The kernels that `launch` starts, compiled and not started."""
    assert not triton.knobs.runtime.interpret, "interpreted kernels can't be compiled"
    triton.runtime.driver.set_active(_Driver())
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[-1]

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def registers(kernel: Any, *, waits: bool = True) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it spills, as ptxas says.

    waits: whether products may wait for each other, which ptxas calls serialized.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        ptxas = get_ptxas(TARGET.arch).path
        line = [ptxas, "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder, "out"))]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill", said)
    assert used and spilled, said
    assert waits or "serialized" not in said, said
    return int(used[1]), int(spilled[1])


def in_fresh_process(module: str, *arguments: str) -> None:
    """Run `module` without the interpreter that tests choose."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(line, check=False, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""The interpreter ends while the engine's thread is in the middle of a step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio
from penstock import AsyncLLM, SamplingParams

async def read(llm):
    async for _ in llm.generate([5], SamplingParams(max_tokens=500, ignore_eos=True)):
        pass

async def main():
    llm = AsyncLLM()
    tasks = [asyncio.create_task(read(llm)) for _ in range(32)]
    await asyncio.sleep(0.3)
    assert llm.stats()["running"] == 32 and tasks
    raise SystemExit(7)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_exit_while_requests_run(attempt: int) -> None:
    """A thread that is still in a kernel when the interpreter goes would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr == ""

"""Stages that wait at addresses, as those of other machines do."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.config.parallel import parse_address
from penstock.errors import ConfigError, EngineDeadError, RankError
from penstock.runtime.away import KEY
from tests.engine.test_ranks import TEXTS, ends, said

SECRET = "a key of the tests, long enough"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextmanager
def waiting(address: str, model: str = "stories", secret: str = SECRET) -> Iterator[int]:
    """A stage there; the number of its process."""
    run = "from penstock.cli.main import run; run()"
    command = [sys.executable, "-c", run, "rank", model, "--listen", address]
    with subprocess.Popen(
        command, env=os.environ | {KEY: secret}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "waits at" in process.stderr.readline()
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)


def sessions(pid: int) -> list[int]:
    """The processes that it has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            found += [int(stat.parent.name)] * (int(parent) == pid)
    return found


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


@pytest.mark.quick
def test_they_say_what_one_process_says() -> None:
    """One engine after another, over one stage and over two."""
    whole = said(LLM().generate(TEXTS, GREEDY))
    addresses = [free_address(), free_address()]
    with ExitStack() as stack:
        pids = [stack.enter_context(waiting(address)) for address in addresses]
        for used in (addresses, addresses[:1]):
            llm = LLM(stage_addresses=used)
            assert llm.engine.runtime.runner.is_pipelined
            assert said(llm.generate(TEXTS, GREEDY)) == whole
            del llm
            gc.collect()
        first = sessions(pids[0])
    assert all(map(ends, [*pids, *first]))


def test_one_that_goes_away() -> None:
    address = free_address()
    with waiting(address) as pid:
        llm = LLM(stage_addresses=[address])
        assert llm.generate(TEXTS[:1], GREEDY)
        (session,) = sessions(pid)
        os.kill(session, signal.SIGKILL)
        with pytest.raises((RankError, EngineDeadError), match=f"rank 1 at {address} has hung up"):
            llm.generate(TEXTS[:1], GREEDY)
        assert said(
            LLM(stage_addresses=[address]).generate(TEXTS[:1], GREEDY)
        )  # a new one is there


def test_one_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_address()
    with pytest.raises(RankError, match=f"No stage can be reached at {address}: .*penstock rank"):
        LLM(stage_addresses=[address])
    with waiting(address, model="stories-chat"):
        with pytest.raises(RankError, match=r"load its part of the model: .*aren't those in"):
            LLM(stage_addresses=[address])
        start = time.monotonic()
        monkeypatch.setenv(KEY, "another key, of as many letters")
        with pytest.raises(RankError, match=f"The stage at {address} has another key in"):
            LLM(stage_addresses=[address])
        assert time.monotonic() - start < 20
        monkeypatch.setenv(KEY, "short")
        with pytest.raises(ConfigError, match="16 characters at least in PENSTOCK_RANK_KEY"):
            LLM(stage_addresses=[address])


def test_addresses() -> None:
    assert parse_address("10.0.0.2:7433") == ("10.0.0.2", 7433)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("host", ":7433", "host:", "host:0", "host:70000", "host:7x"):
        with pytest.raises(ConfigError, match="isn't an address: write it like"):
            parse_address(wrong)
    for wrong_list in ("10.0.0.2:7433", [1], {"a": 1}):
        with pytest.raises(ConfigError, match="stage_addresses must be a list"):
            LLM(stage_addresses=wrong_list)
    with pytest.raises(ConfigError, match="1 stage_addresses are those of 2 stages of one process"):
        LLM(stage_addresses=["a:1"], pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match="1 stage_addresses are those of 2 stages of one process"):
        LLM(stage_addresses=["a:1"], tensor_parallel_size=2)

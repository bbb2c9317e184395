"""Engines whose model several processes share: their outputs are one process's, by `==`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from penstock.errors import ConfigError, EngineDeadError, RankError
from penstock.runtime.team import Here, cpus_of_ranks

TEXTS = [
    "Once upon a time, there was a little girl named Lily. She liked to play",
    "Once upon a time, there was a little dog. He",
    "Tom had a red ball. One day",
    "The cat sat on the",
    "It was a sunny day and the birds",
]


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, and the log-probabilities of each."""
    return [
        [
            (o.token_ids, [{i: x.logprob for i, x in at.items()} for at in o.logprobs or []])
            for o in output.outputs
        ]
        for output in outputs
    ]


WAYS = [
    pytest.param({"tensor_parallel_size": 2}, id="tensor"),
    pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
]


def both(ask: Callable[[LLM], Any], way: dict[str, int], **engine: Any) -> tuple[Any, Any]:
    """What one process says, and what several say."""
    return ask(LLM(**engine)), ask(LLM(**engine, **way))


def processes(llm: LLM) -> list[int]:
    team = llm.engine.runtime.team
    assert team is not None
    return [other.process.pid for other in team._others if isinstance(other, Here)]


def ends(pid: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.quick
@pytest.mark.parametrize("way", [*WAYS, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}])
def test_requests_in_a_batch(way: dict[str, int]) -> None:
    """Prompts in chunks, samples that share blocks, others that must give way and come back."""
    greedy = SamplingParams(temperature=0, max_tokens=40, logprobs=3)
    drawn = SamplingParams(n=3, seed=7, max_tokens=30, logprobs=1, prompt_logprobs=1)

    def ask(llm: LLM) -> Any:
        found = [said(llm.generate(TEXTS, params)) for params in (greedy, drawn, drawn)]
        stats = llm.stats()
        return found, stats["preemptions"]

    for mode in ("swap", "recompute"):
        engine: dict[str, Any] = {
            "max_model_len": 160, "max_num_batched_tokens": 24, "max_num_seqs": 16,
            "num_blocks": 8, "preemption_mode": mode,
        }  # fmt: skip
        one, two = both(ask, way, **engine)
        assert one == two
        assert one[1]


@pytest.mark.parametrize("way", WAYS)
def test_long_prompts(way: dict[str, int]) -> None:
    """Steps that go through stages in parts; with all that is read of their logits."""
    prompts = [{"prompt_token_ids": [5 + (i * j) % 999 for i in range(700)]} for j in (3, 7)]
    kinds = (
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=2),
        SamplingParams(seed=3, max_tokens=4, n=2),
    )

    def ask(llm: LLM) -> Any:
        found = [llm.generate(prompts, kind) for kind in kinds]
        read = [[[x.logprob for x in (at or {}).values()] for at in o.prompt_logprobs or []]
                for o in found[1]]  # fmt: skip
        return [said(each) for each in found], read

    one, two = both(ask, way, enable_prefix_caching=False)
    assert one == two


@pytest.mark.parametrize("way", WAYS)
def test_a_search_and_embeddings(way: dict[str, int]) -> None:
    def ask(llm: LLM) -> Any:
        beams = llm.beam_search(TEXTS[:2], BeamSearchParams(beam_width=3, max_tokens=12))
        vectors = [torch.tensor(o.outputs.embedding) for o in llm.embed(TEXTS)]
        return [[s.tokens for s in b.sequences] for b in beams], torch.stack(vectors)

    (one, vectors), (two, others) = both(ask, way)
    assert one == two
    assert torch.equal(vectors, others)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "engine",
    [
        {"quantization": "w8a8", "kv_cache_dtype": "int8"},
        {"quantization": "w4a8", "speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "draft_model"}},
        {"enforce_eager": True},
    ],
)
def test_other_engines(engine: dict[str, Any], way: dict[str, int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    model = {"model": "stories-chat", **engine}
    one, two = both(lambda llm: said(llm.generate(TEXTS, params)), way, **model)
    assert one == two


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_ends_the_engine(way: dict[str, int]) -> None:
    llm = LLM(**way)  # type: ignore[arg-type]
    (rank,) = processes(llm)
    assert llm.generate(TEXTS[:1])
    os.kill(rank, signal.SIGKILL)
    says = (
        rf"2 processes .* can't go on: rank 1 \(process {rank}\) has ended with -9. Load it again"
    )
    for _ in range(2):
        with pytest.raises((RankError, EngineDeadError), match=says):
            llm.generate(TEXTS[:1])


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_in_a_step(way: dict[str, int]) -> None:
    """Whoever waits for it is told; the server's engine says that it is dead."""

    async def serve() -> None:
        llm = AsyncLLM(**way)  # type: ignore[arg-type]
        team = llm.runtime.team
        assert team is not None
        rank = team._others[0]
        assert isinstance(rank, Here)

        async def stream(name: str) -> None:
            long = SamplingParams(max_tokens=900, ignore_eos=True)
            count = 0
            async for _ in llm.generate(TEXTS[0], long, name):
                count += 1
                if count == 5:
                    os.kill(rank.process.pid, signal.SIGKILL)

        with pytest.raises(EngineDeadError, match=r"rank 1 .* has ended with -9"):
            await stream("a")
        with pytest.raises(EngineDeadError):
            await stream("b")
        llm.shutdown()

    asyncio.run(serve())


def test_one_that_dies_while_nothing_runs_is_known_of() -> None:
    """Health says so before a request fails."""

    async def serve() -> None:
        llm = AsyncLLM(tensor_parallel_size=2)
        assert llm.death is None
        team = llm.runtime.team
        assert team is not None
        rank = team._others[0]
        assert isinstance(rank, Here)
        os.kill(rank.process.pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while llm.death is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert "has ended with -9" in str(llm.death)
        llm.shutdown()

    asyncio.run(serve())


def test_one_that_stops_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.team.Team.STEP_S", 0.5)

    async def serve() -> None:
        llm = AsyncLLM(tensor_parallel_size=2)
        team = llm.runtime.team
        assert team is not None
        rank = team._others[0]
        assert isinstance(rank, Here)

        async def ask() -> None:
            async for _ in llm.generate(TEXTS[0], SamplingParams(max_tokens=900), "a"):
                os.kill(rank.process.pid, signal.SIGSTOP)

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await asyncio.to_thread(llm.shutdown)
        assert time.monotonic() - begun < 5
        with pytest.raises(EngineDeadError):
            await asking

    asyncio.run(serve())


def test_ranks_end_with_their_engine() -> None:
    llm = LLM(tensor_parallel_size=2)
    (rank,) = processes(llm)
    assert not ends(rank, 0.1)
    del llm
    gc.collect()
    assert ends(rank)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
@pytest.mark.parametrize("how", ["kill", "exit", "interrupt"])
def test_ranks_end_with_the_first_process(how: str, way: str) -> None:
    code = """
import os, sys
from penstock import LLM, SamplingParams
llm = LLM(**{sys.argv[2] + "_parallel_size": 2})
print(llm.engine.runtime.team._others[0].process.pid, flush=True)
if sys.argv[1] != "exit":
    while True:
        llm.generate("Once", SamplingParams(max_tokens=900, ignore_eos=True))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, how, way],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        if how != "exit":
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        if how == "exit":
            assert process.returncode == 0, errors
    assert ends(rank)
    with suppress(ProcessLookupError):
        os.kill(rank, 0)


def test_a_rank_that_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "nonsense")  # that the first has long read
    says = "Rank 1 of 2 couldn't load its part of the model: .* ended with 1: stderr has its last"
    with pytest.raises(RankError, match=says):
        LLM(tensor_parallel_size=2)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="no effect on a model without experts"):
        LLM(tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_each_rank_on_a_memory_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when they have ended, the first process is where it was, with all its threads."""
    first, second, *_ = before = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("penstock.runtime.team.numa_cpus", lambda: ((first,), (second,)))
    llm = LLM(tensor_parallel_size=2)
    (rank,) = processes(llm)
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert all(os.sched_getaffinity(thread) == {first} for thread in threads)
    assert os.sched_getaffinity(rank) == {second}
    assert llm.generate(TEXTS[:1])
    del llm
    gc.collect()
    assert ends(rank)
    assert os.sched_getaffinity(0) == set(before)


def test_ranks_on_several_memory_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (tuple(range(8)), tuple(range(8, 16)))
    monkeypatch.setattr("penstock.runtime.team.numa_cpus", lambda: nodes)
    monkeypatch.setattr("penstock.runtime.team.usable_cpus", lambda: tuple(range(16)))
    assert cpus_of_ranks(2) == list(nodes)
    assert cpus_of_ranks(4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert cpus_of_ranks(3) == [()] * 3
    monkeypatch.setattr("penstock.runtime.team.numa_cpus", lambda: (tuple(range(16)),))
    assert cpus_of_ranks(2) == [()] * 2

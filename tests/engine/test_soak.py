"""Thousands of short requests that come and go: every block comes back, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import AsyncLLM, SamplingParams
from penstock.cache import PagedLayout
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.engine.request import Request
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import (
    AttentionSpec,
    Decoder,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from penstock.quant import formats_of
from penstock.runtime import Runner, Runtime

from ..exactness.bits import fill
from .letters import tokenizer
from .toy import check

VOCAB, MAX_LEN, BLOCKS = 64, 128, 12


def tiny_runtime() -> Runtime:
    """A real decoder, small enough for a hundred thousand tokens."""
    attention = AttentionSpec(2, 1, 16, 0.25, RopeSpec(10000.0, 16))
    decoder = DecoderSpec(VOCAB, 32, (LayerSpec(attention, MlpSpec(48)),) * 2, NormSpec(), MAX_LEN)
    model = fill(Decoder(decoder, formats_of(None, torch.float32), torch.float32))
    layout = PagedLayout(((1, 16),) * 2, torch.float32, 32)
    spec = ModelSpec("tiny", decoder, (), "float32", None, (1,))
    loaded = LoadedModel(model, spec, torch.float32, MAX_LEN, {}, (1,))
    return Runtime(loaded, tokenizer(), layout, BLOCKS, Runner(model, layout.allocate(BLOCKS)))


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Half begin alike; every option of the sampler turns up."""
    shared = [7 + i % 40 for i in range(rng.choice([0, 0, 33, 64, 90]))]
    prompt = shared + [rng.randrange(2, 62) for _ in range(rng.randint(1, 20))]
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, 3, 8, 20, 40]),
        "temperature": rng.choice([0.0, 0.8]),
    }
    for name, values in {
        "top_p": [0.9], "top_k": [5], "seed": [1, 2], "repetition_penalty": [1.2],
        "logprobs": [0, 3], "prompt_logprobs": [1], "stop": ["ab", ["z", "qq"]],
        "stop_token_ids": [[5]], "min_tokens": [1], "ignore_eos": [True],
        "logit_bias": [{3: 2.0}],
    }.items():  # fmt: skip
        if rng.random() < 0.15:
            options[name] = rng.choice(values)
    if options["temperature"]:
        options["n"] = rng.choice([1, 1, 1, 2, 4])
    return prompt, SamplingParams(**options)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(count: int) -> tuple[Engine, list[int], dict[str, int]]:
    """Run `count` requests; the engine, the memory after each hundredth, and how they ended."""
    rng = random.Random(0)
    engine = Engine(EngineConfig.of(max_num_seqs=12, max_num_batched_tokens=40), tiny_runtime())
    added, ended = 0, dict.fromkeys(("stop", "length", "abort"), 0)
    memory, marks = [], max(count // 100, 1)
    while added < count or engine.has_unfinished:
        while added < count and len(engine.requests) < 30 and rng.random() < 0.7:
            prompt, params = random_request(rng)
            engine.add_request(str(added), prompt, params, stream=rng.random() < 0.5)
            added += 1
            if added % marks == 0:
                memory.append(resident_bytes())
        if engine.requests and rng.random() < 0.06:
            engine.abort(rng.choice(list(engine.requests)))
        for output in engine.step():
            if output.finished:
                assert output.error is None
                ended[output.outputs[-1].finish_reason or ""] += 1
        if rng.random() < 0.01:
            check(engine)
    assert sum(ended.values()) == count
    return engine, memory, ended


def assert_clean(engine: Engine) -> None:
    check(engine)
    assert engine.stats()["used_blocks"] == 0
    assert not engine.requests and not engine.scheduler.has_work
    engine.reset_prefix_cache()
    assert sorted(engine.pool._free) == list(range(BLOCKS))
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Request]


def test_a_thousand_requests() -> None:
    engine, _, ended = soak(1000)
    assert min(ended.values()) > 50
    stats = engine.stats()
    assert stats["preemptions"] > 10
    assert stats["prefix_hit_rate"] > 0.2
    assert_clean(engine)


@pytest.mark.slow
def test_ten_thousand_requests(capsys: pytest.CaptureFixture[str]) -> None:
    engine, memory, ended = soak(10_000)
    half = memory[len(memory) // 2 :]
    mean = sum(half) / len(half)
    low, high = min(half) / mean - 1, max(half) / mean - 1
    with capsys.disabled():
        mib = [size / (1 << 20) for size in (memory[0], half[0], half[-1])]
        print(
            f"\nresident: {mib[0]:.1f} MiB at 1%, {mib[1]:.1f} at 50%, {mib[2]:.1f} at the end; "
            f"second half {low:+.2%} … {high:+.2%} of its mean; ended {ended}; {engine.stats()}"
        )
    assert low > -0.02 and high < 0.02
    assert_clean(engine)


def test_clients_that_come_and_go() -> None:
    """Hundreds of streams, many left or cancelled at a random moment."""
    rng = random.Random(1)
    finished = 0

    async def client(llm: AsyncLLM, seed: int) -> None:
        nonlocal finished
        own = random.Random(seed)
        await asyncio.sleep(own.random() * 0.2)
        prompt, params = random_request(own)
        leave = own.choice([None, None, 1, 3])
        count = 0
        async for output in llm.generate(prompt, params):
            count += 1
            if output.finished:
                finished += 1
            elif count == leave:
                break

    async def body() -> None:
        llm = AsyncLLM(runtime=tiny_runtime(), max_num_seqs=12, max_num_batched_tokens=40)
        try:
            tasks = [asyncio.create_task(client(llm, i)) for i in range(400)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.005)
                if rng.random() < 0.3:
                    rng.choice(tasks).cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(one) for one in outcomes} == {type(None), asyncio.CancelledError}
            while llm.engine.has_unfinished:
                await asyncio.sleep(0.005)
            assert llm.stats()["used_blocks"] == 0
            assert not llm._streams
        finally:
            llm.shutdown()
        assert_clean(llm.engine)

    asyncio.run(asyncio.wait_for(body(), 60))
    assert finished > 100

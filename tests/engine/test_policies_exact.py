"""A real decoder under every policy and both ways of giving way: each request as if alone."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOptions, RequestOutput
from penstock.sampling import SamplingParams

from .test_soak import tiny_runtime
from .toy import check

COUNT = 90


@cache
def asked() -> list[tuple[list[int], SamplingParams]]:
    """Short prompts, some of which begin alike, and long outputs: the cache runs out often."""
    rng, found = random.Random(7), []
    for i in range(COUNT):
        prompt = [7 + k % 40 for k in range(rng.choice([0, 0, 32]))]
        prompt += [rng.randrange(2, 62) for _ in range(rng.randint(2, 30))]
        params = SamplingParams(
            n=rng.choice([1, 1, 2, 3]),
            temperature=0.8,
            seed=i,
            max_tokens=rng.randint(20, 60),
            logprobs=0,
            prompt_logprobs=rng.choice([None, None, 0]),
            ignore_eos=True,
        )
        found.append((prompt, params))
    return found


def seen(output: RequestOutput) -> list[Any]:
    return [
        (s.index, s.token_ids, s.text, s.finish_reason, s.cumulative_logprob)
        for s in output.outputs
    ]


@cache
def alone() -> list[list[Any]]:
    """Each by itself, nothing cached."""
    config = EngineConfig.of(max_num_seqs=4, enable_prefix_caching=False)
    runtime, found = tiny_runtime(), []
    for prompt, params in asked():
        engine = Engine(config, runtime)
        engine.add_request("it", prompt, params)
        while engine.has_unfinished:
            found += [seen(output) for output in engine.step()]
    return found


def options(policy: str, rng: random.Random) -> RequestOptions:
    if policy == "priority":
        return RequestOptions(priority=rng.randrange(-3, 4))
    if policy == "edf" and rng.random() < 0.7:
        return RequestOptions(ttft_slo_s=rng.uniform(1, 40), tpot_slo_s=rng.choice([None, 2.0]))
    return RequestOptions()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "edf"])
def test_as_if_alone(policy: str, mode: str) -> None:
    now, rng = 0.0, random.Random(f"{policy} {mode}")
    more: dict[str, Any] = {} if policy == "fcfs" else {"starvation_s": 50.0}
    config = EngineConfig.of(
        max_num_seqs=12, max_num_batched_tokens=40, policy=policy, preemption_mode=mode, **more
    )
    engine = Engine(config, tiny_runtime(), lambda: now)
    left, aborted = list(enumerate(asked())), set[str]()
    while left or engine.has_unfinished:
        now += 1.0
        while left and rng.random() < 0.6:
            i, (prompt, params) = left.pop(0)
            wish = options(policy, rng)
            engine.add_request(str(i), prompt, params, options=wish)
        if engine.requests and rng.random() < 0.04:
            name = rng.choice(list(engine.requests))
            aborted.add(name)
            engine.abort(name)
        for output in engine.step():
            if output.request_id not in aborted:
                assert seen(output) == alone()[int(output.request_id)]
        check(engine)
    stats = engine.stats()
    assert stats[f"preemptions_{mode}"] > 3
    assert len(aborted) < COUNT // 2
    assert stats["used_blocks"] == stats["swapped_blocks"] == stats["swapped"] == 0
    assert not engine.scheduler.has_work

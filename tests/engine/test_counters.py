"""Tokens are counted once each, as they are computed; requests by what their samples do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.counters import requests_by_state
from penstock.sampling import SamplingParams

from .toy import drain, toy_engine

LENGTH = 32


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_giving_way_counts_nothing_twice(mode: str, caching: bool) -> None:
    engine = toy_engine(8, LENGTH, preemption_mode=mode, enable_prefix_caching=caching)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for name in "abcd":
        engine.add_request(name, prompt(8, ord(name)), params)
    done = drain(engine)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["prompt_tokens"] == 4 * 8
    assert stats["generation_tokens"] == sum(len(x.outputs[0].token_ids) for x in done.values())


def test_chunks_count_as_they_are_computed_and_hits_at_the_start() -> None:
    engine = toy_engine(16, LENGTH, max_num_batched_tokens=5, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    engine.add_request("a", prompt(12), params)
    seen = []
    while engine.has_unfinished:
        engine.step()
        stats = engine.stats()
        seen.append((stats["prompt_tokens"], stats["generation_tokens"]))
    assert seen == [(5, 0), (10, 0), (12, 1), (12, 2), (12, 3)]
    engine.add_request("b", prompt(12), params)
    engine.step()
    assert engine.requests["b"].metrics.cached_tokens == 8
    assert engine.stats()["prompt_tokens"] == 12 + 12
    drain(engine)


def test_samples_share_their_prompt() -> None:
    engine = toy_engine(32, LENGTH, max_num_seqs=4)
    engine.add_request("a", prompt(6), SamplingParams(n=3, seed=1, max_tokens=4))
    engine.step()
    stats = engine.stats()
    assert (stats["requests_running"], stats["running"]) == (1, 3)
    engine.add_request("b", prompt(7), SamplingParams(n=3, seed=1, max_tokens=4))
    engine.step()
    stats = engine.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (1, 1)
    done = drain(engine)
    stats = engine.stats()
    assert stats["prompt_tokens"] == 6 + 7
    made = sum(len(sample.token_ids) for x in done.values() for sample in x.outputs)
    assert stats["generation_tokens"] == made


def test_a_request_is_in_one_state() -> None:
    """Whatever its samples do: one may run while others of it wait, or are swapped out."""

    class Asked:
        guides = None

    one: Any
    two: Any
    three: Any
    one, two, three = Asked(), Asked(), Asked()

    def of(request: Any) -> Any:
        return SimpleNamespace(request=request, owner=request)

    def states(running: int, waiting: int, swapped: int) -> dict[str, int]:
        return {"requests_running": running, "requests_waiting": waiting,
                "requests_swapped": swapped}  # fmt: skip

    assert requests_by_state(0, [], []) == states(0, 0, 0)
    assert requests_by_state(3, [of(one), of(one)], []) == states(1, 2, 0)
    assert requests_by_state(3, [of(one), of(two)], [two, three]) == states(2, 0, 1)

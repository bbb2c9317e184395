"""The queue: its order, who has waited too long, and what ten thousand that wait cost."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from penstock.config import SchedulerConfig
from penstock.engine import RequestMetrics, RequestOptions
from penstock.engine import waiting as module
from penstock.engine.policy import policy_of
from penstock.engine.request import Request, Sequence
from penstock.engine.waiting import WaitingQueue
from penstock.sampling import SamplingParams, SequenceSampling

PARAMS = SamplingParams()


def sequence(arrival: int, priority: int = 0) -> Sequence:
    request = Request(
        str(arrival), None, [1], PARAMS, arrival, False, RequestMetrics(0.0),
        RequestOptions(priority=priority),
    )  # fmt: skip
    sampling = SequenceSampling(PARAMS, [1], 8, 0, frozenset(), 0)
    request.sequences = [Sequence(request, 0, [1], sampling, None)]
    return request.sequences[0]


def queue(starvation_s: float = 1e9) -> WaitingQueue:
    return WaitingQueue(policy_of(SchedulerConfig(policy="priority")), starvation_s)


def test_the_lowest_goes_first_and_ties_go_by_arrival() -> None:
    waiting = queue()
    for s in [sequence(0, 5), sequence(1, -1), sequence(2, 5), sequence(3, 0)]:
        waiting.add(s, 0.0)
    order = []
    while waiting:
        assert waiting.first() is next(iter(waiting))
        order.append(waiting.first().request.arrival)
        waiting.remove(waiting.first())
    assert order == [1, 3, 0, 2]
    assert waiting.first() is None


def test_set_aside_is_passed_until_it_is_put_back() -> None:
    waiting = queue(starvation_s=10.0)
    everyone = [sequence(i, i) for i in range(4)]
    for s in everyone:
        waiting.add(s, 0.0)
    assert waiting.first() is everyone[0]
    aside = [waiting.set_aside()]
    assert waiting.first() is everyone[1]
    waiting.remove(everyone[1])
    assert waiting.first() is everyone[2]
    aside.append(waiting.set_aside())
    assert len(waiting) == 3 and everyone[0] in waiting
    waiting.put_back(aside)
    assert list(waiting) == [everyone[0], everyone[2], everyone[3]]
    assert waiting.first() is everyone[0]
    waiting.age(10.5)  # it waited all the time
    aside = []
    while waiting.first() is not None:
        aside.append(waiting.set_aside())
    waiting.put_back(aside)
    assert all(s.overdue for s in waiting) and waiting.first() is everyone[0]


def test_the_overdue_go_first_by_arrival() -> None:
    waiting = queue(starvation_s=10.0)
    late, later, fresh = sequence(1, 9), sequence(0, 3), sequence(2, -5)
    waiting.add(late, 0.0)
    waiting.add(later, 1.0)
    waiting.add(fresh, 5.0)
    waiting.age(10.0)
    assert waiting.first() is fresh  # ten seconds aren't longer than ten
    waiting.age(10.5)
    assert list(waiting) == [late, fresh, later]
    waiting.age(11.5)
    assert list(waiting) == [later, late, fresh]
    assert [s.overdue for s in (late, later, fresh)] == [True, True, False]
    waiting.remove(later)
    waiting.add(later, 12.0)  # it ran and gave way: it need not wait again
    assert waiting.first() is later


def test_against_a_sorted_list() -> None:
    """Random additions, removals from anywhere and ageing."""
    rng = random.Random(0)
    waiting, held, gone = queue(20.0), dict[Sequence, float](), list[Sequence]()
    for now in range(4000):
        waiting.age(float(now))
        for s, since in held.items():
            s_overdue = now - since > 20.0
            assert s.overdue or not s_overdue
        what = rng.random()
        if what < 0.5:
            again = gone.pop() if gone and rng.random() < 0.3 else None
            s = again or sequence(now, rng.randrange(-3, 4))
            waiting.add(s, float(now))
            held[s] = float(now)
        elif held:
            s = waiting.first() if what < 0.75 else rng.choice(list(held))
            waiting.remove(s)
            del held[s]
            gone.append(s)
        wanted = sorted(
            held,
            key=lambda s: (not s.overdue, 0 if s.overdue else s.request.options.priority, s.order),
        )
        assert len(waiting) == len(held)
        assert all(s in waiting for s in held)
        if held:
            assert waiting.first() is wanted[0]
        if now % 100 == 0:
            assert list(waiting) == wanted
    assert len(waiting._heap) + len(waiting._overdue) <= 2 * len(held) + 64


def test_one_without_a_rank_leaves_nothing() -> None:
    policy = policy_of(SchedulerConfig(policy="edf", ttft_slo_s=1.0))
    queued = WaitingQueue(policy, 1e9)
    wrong = sequence(0)
    wrong.request.metrics.arrival_time = "12.5"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        queued.add(wrong, 0.0)
    assert len(queued) == 0
    right = sequence(1)
    queued.add(right, 0.0)
    assert list(queued) == [right] and queued.first() is right


def test_an_empty_queue_holds_on_to_nobody() -> None:
    waiting = queue(1.0)
    for arrival in range(50):
        waiting.add(sequence(arrival), 0.0)
    waiting.age(2.0)
    for s in list(waiting):
        waiting.remove(s)
    assert not waiting._heap and not waiting._overdue and not waiting._since


def test_ten_thousand_that_wait_cost_a_step_a_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of ranks are counted, not seconds."""
    compared = 0

    class Counted(tuple[Any, ...]):
        def __lt__(self, other: Any) -> bool:
            nonlocal compared
            compared += 1
            return tuple(self) < tuple(other)

    push = heapq.heappush
    monkeypatch.setattr(module.heapq, "heappush", lambda heap, entry: push(heap, Counted(entry)))
    rng, waiting = random.Random(0), queue(1e9)
    everyone = [sequence(i, rng.randrange(1000)) for i in range(10_000)]
    for s in everyone:
        waiting.add(s, 0.0)
    assert compared < 10_000 * 14
    compared = 0
    for step in range(1000):  # as in a step: look, start one, and now and then one is aborted
        waiting.age(float(step))
        waiting.first()
        waiting.remove(waiting.first())
        if step % 10 == 0:
            waiting.remove(rng.choice(list(waiting._tickets)))
    assert compared < 1000 * 2 * 14 * 2

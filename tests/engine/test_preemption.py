"""Giving way: what it is predicted to cost, which way is taken, and that nothing is lost by it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from penstock.config import SchedulerConfig
from penstock.engine import Engine, PreemptionRecord, RequestOptions
from penstock.engine.preemption import ASSUMED_BYTES_PER_S, CostPredictor, LearntSpeed, Preemption
from penstock.engine.request import Status
from penstock.engine.scheduler import Scheduler
from penstock.hardware import Peaks
from penstock.roofline import Ledger, StepRecord, StepSize, floor_s
from penstock.sampling import SamplingParams

from .toy import BLOCK, BLOCK_GIB, check, drain, reference, toy_engine

PEAKS = Peaks(1e9, 1e10, 0.0, 1, "")
LENGTH = 32


def greedy(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def drawn(n: int, max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(n=n, seed=1, max_tokens=max_tokens)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def swapping(num_blocks: int = 8, **more: Any) -> Engine:
    more.setdefault("enable_prefix_caching", False)
    return toy_engine(num_blocks, LENGTH, preemption_mode="swap", **more)


def until_swapped(engine: Engine) -> Any:
    """Step until somebody is swapped out; the request."""
    while not engine.scheduler.num_swapped:
        engine.step()
    (request,) = engine.scheduler.swapper.groups
    return request


# ── what it will cost ────────────────────────────────────────────────────────────────────────────


def test_speeds_are_averaged_by_size() -> None:
    speed = LearntSpeed()
    assert speed.seconds(10, 100.0) is None
    speed.observe(10, 100.0, 2.0)
    assert speed.seconds(9, 100.0) == 2.0
    assert speed.seconds(1 << 20, 50.0) == 1.0  # the nearest there is
    speed.observe(1 << 20, 1000.0, 1.0)
    assert speed.seconds(1 << 20, 50.0) == 0.05
    speed.observe(10, 100.0, 1.0)
    assert speed.seconds(10, 60.0) == 60.0 / (50.0 + 0.2 * 50.0)
    for nothing in ((10, 0.0, 1.0), (10, 1.0, 0.0)):
        speed.observe(*nothing)
    assert speed.seconds(10, 60.0) == 1.0


def test_one_interruption_counts_little() -> None:
    speed = LearntSpeed()
    for seconds in (1.0, 1.0, 1000.0):
        speed.observe(1, 1.0, seconds)
    assert speed.seconds(1, 1.0) == pytest.approx(1.25, abs=1e-3)


def record_of(ledger: Ledger, size: StepSize, forward_s: float) -> StepRecord:
    return ledger.record(size, [0.0, 0.0, 0.0, forward_s, forward_s, forward_s])


@pytest.mark.parametrize("peaks", [PEAKS, None])
def test_a_prefill_takes_its_floor_over_the_share_reached(peaks: Peaks | None) -> None:
    """Or, where no peaks are known, its tokens over the tokens a second."""
    costs = toy_engine().ledger.costs
    ledger = Ledger(costs, peaks)
    predictor = CostPredictor(ledger, 512, 16)
    assert predictor.recompute_s(0, 16) is None
    size = StepSize([12], [12], 1)
    predictor.saw_step(record_of(ledger, size, 0.5))
    if peaks is None:
        assert predictor.recompute_s(0, 24) == 24 / (12 / 0.5)
        assert predictor.recompute_s(16, 24) == 8 / (12 / 0.5)
        return
    share = floor_s(costs.cost(size), peaks) / 0.5
    chunks = [StepSize([16], [16], 0), StepSize([8], [24], 0)]
    floor = sum(floor_s(costs.cost(chunk), peaks) for chunk in chunks)
    assert predictor.recompute_s(0, 24) == pytest.approx(floor / share)
    last = floor_s(costs.cost(chunks[1]), peaks)
    assert predictor.recompute_s(16, 24) == pytest.approx(last / share)


def test_a_copy_takes_its_bytes_at_the_measured_bandwidth() -> None:
    predictor = CostPredictor(Ledger(toy_engine().ledger.costs, None), 1000, 64)
    assert predictor.swap_s(8, 6) == 14_000 / ASSUMED_BYTES_PER_S
    predictor.saw_copy(8, 2.0, back=False)
    predictor.saw_copy(8, 1.0, back=True)
    assert predictor.swap_s(8, 8) == 3.0
    assert predictor.swap_s(8, 4) == 2.5


def test_what_others_will_not_have_taken_need_not_be_computed_again() -> None:
    """The last in the order gives way, and returns when the first ends: what is left is known."""
    engine = toy_engine(20, 64, policy="fcfs")
    predicted = list[tuple[int, int]]()

    def noted(start: int, end: int) -> float:
        predicted.append((start, end))
        return 1.0

    engine.preemption.predictor.recompute_s = noted  # type: ignore[method-assign]
    engine.add_request("a", prompt(30), greedy(8))
    engine.add_request("b", prompt(21, 1), greedy(40))
    engine.add_request("c", prompt(16, 2), greedy(40))
    engine.step()
    (c,) = engine.requests["c"].sequences
    while not c.request.metrics.preemptions:
        engine.step()
    ((start, end),) = predicted
    assert 0 < start < end
    hits = list[int]()
    starts_again = engine.preemption.starts_again

    def seen(sequence: Any, found: int) -> None:
        if sequence is c:
            hits.append(found)
        starts_again(sequence, found)

    engine.preemption.starts_again = seen  # type: ignore[method-assign]
    drain(engine)
    assert hits[0] == start


@pytest.mark.parametrize(
    ("mode", "recompute_s", "swap_s", "swaps"),
    [
        ("auto", 2.0, 1.0, True),
        ("auto", 1.0, 2.0, False),
        ("auto", None, 1.0, False),
        ("swap", 1.0, 2.0, True),
        ("recompute", 2.0, 1.0, False),
    ],
)
def test_the_cheaper_way(mode: Any, recompute_s: float | None, swap_s: float, swaps: bool) -> None:
    engine = toy_engine()
    preemption = Preemption(SchedulerConfig(preemption_mode=mode), engine.preemption.predictor)
    one = PreemptionRecord("a", "recompute", 9, 3, recompute_s)
    other = PreemptionRecord("a", "swap", 9, 3, swap_s)
    assert preemption.prefers_swap(one, other) is swaps


@pytest.mark.parametrize(("seconds", "way"), [(1e-9, "swap"), (1e9, "recompute")])
def test_auto_takes_it(seconds: float, way: str) -> None:
    """An engine whose copies are said to take no time, or for ever."""
    engine = toy_engine(8, LENGTH, preemption_mode="auto", enable_prefix_caching=False)
    engine.preemption.predictor.swap_s = lambda out, back: seconds  # type: ignore[method-assign]
    for name in "abc":
        engine.add_request(name, prompt(8, ord(name)), greedy())
    done = drain(engine)
    stats = engine.stats()
    assert stats[f"preemptions_{way}"] == stats["preemptions"] > 0
    for name in "abc":
        want = reference(prompt(8, ord(name)), greedy(), max_model_len=LENGTH)
        assert done[name].outputs[0].token_ids == want


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_each_is_recorded_with_what_it_cost(mode: str, caching: bool) -> None:
    engine = toy_engine(8, LENGTH, preemption_mode=mode, enable_prefix_caching=caching)
    watched = dict[str, float]()
    engine.ledger.watch = lambda record: watched.update(forward=record.forward_s)
    for name in "abcd":
        engine.add_request(name, prompt(8, ord(name)), greedy())
    done = drain(engine)
    log = engine.preemption_log
    assert len(log) == engine.stats()["preemptions"] > 0
    assert {r.mode for r in log} == {mode}
    for record in log:
        assert record.predicted_s is not None and record.predicted_s >= 0
        assert record.tokens > 0 and record.blocks >= -(-record.tokens // BLOCK)
        assert record.redo_tokens == 0
    assert all(r.measured_s > 0 for r in log if not caching or mode == "swap")
    given = {name: sum(r.request_id == name for r in log) for name in "abcd"}
    assert {name: output.metrics.preemptions for name, output in done.items()} == given


def test_what_is_computed_again_costs_its_share_of_the_steps() -> None:
    """Five tokens of a step of ten cost half of it; those beyond what was lost cost nothing."""
    engine = toy_engine()
    engine.add_request("a", prompt(5), greedy())
    engine.step()
    sequence = engine.requests["a"].sequences[0]
    sequence.preempted = PreemptionRecord("a", "recompute", 8, 2, 1.0)
    preemption, ledger = engine.preemption, engine.ledger
    preemption.starts_again(sequence, 0)
    preemption.saw_step(record_of(ledger, StepSize([5, 5], [5, 9], 1), 2.0), [(sequence, 5)])
    assert sequence.preempted.measured_s == 1.0
    preemption.saw_step(record_of(ledger, StepSize([6, 6], [11, 15], 1), 8.0), [(sequence, 6)])
    (record,) = engine.preemption_log
    assert record.measured_s == 1.0 + 8.0 * 3 / 12
    assert sequence.preempted is None


# ── out and back ─────────────────────────────────────────────────────────────────────────────────


def test_samples_leave_and_return_together_and_what_they_share_is_stored_once() -> None:
    engine = swapping(11, max_num_seqs=6)
    engine.add_request("a", prompt(5), greedy(27))
    engine.add_request("b", prompt(3 * BLOCK, 1), drawn(3, 8))
    request = until_swapped(engine)
    assert request.request_id == "b"
    assert [s.status for s in request.sequences] == [Status.SWAPPED] * 3
    stats = engine.stats()
    assert (stats["swapped"], stats["waiting"], stats["running"]) == (3, 0, 1)
    slots = [s.slots for s in request.sequences]
    assert slots[0][:3] == slots[1][:3] == slots[2][:3]
    assert stats["swapped_blocks"] == len({slot for one in slots for slot in one}) < 3 * 4
    while engine.scheduler.num_swapped:
        assert {s.status for s in request.sequences} == {Status.SWAPPED}
        engine.step()
    assert {s.status for s in request.sequences} <= {Status.RUNNING, Status.FINISHED}
    done = drain(engine)
    for sample in done["b"].outputs:
        want = reference(
            prompt(3 * BLOCK, 1), drawn(3, 8), index=sample.index, max_model_len=LENGTH
        )
        assert sample.token_ids == want
    assert engine.stats()["preemptions_swap"] == done["b"].metrics.preemptions > 0


def test_one_group_of_a_request_is_out_at_a_time() -> None:
    """What two share would be stored twice, and might be more than the cache has."""
    engine = swapping(11, max_num_seqs=6)
    engine.add_request("a", prompt(5), greedy(27))
    engine.add_request("b", prompt(3 * BLOCK, 1), drawn(3, 8))
    request = until_swapped(engine)
    assert engine.scheduler.swapper.group_of(request.sequences[0]) == []
    (a,) = engine.requests["a"].sequences
    assert engine.scheduler.swapper.group_of(a) == [a]


def test_what_the_prefix_tree_still_has_is_not_copied_back() -> None:
    engine = swapping(16, enable_prefix_caching=True, policy="priority", max_num_seqs=1)
    engine.add_request("a", prompt(4 * BLOCK), greedy(9))
    engine.step()
    engine.add_request("b", prompt(5, 1), greedy(3), options=RequestOptions(priority=-1))
    request = until_swapped(engine)
    assert len(request.sequences[0].slots) == 4
    copied: list[Any] = []
    swap_in = engine.runtime.runner.swap_in
    engine.runtime.runner.swap_in = lambda pairs: (  # type: ignore[method-assign]
        copied.append(pairs), swap_in(pairs),
    )[1]  # fmt: skip
    done = drain(engine)
    assert copied == [[]]
    want = reference(prompt(4 * BLOCK), greedy(9), max_model_len=LENGTH)
    assert done["a"].outputs[0].token_ids == want


def test_a_full_swap_space_means_recompute() -> None:
    engine = swapping(8, swap_space=3 * BLOCK_GIB)
    assert engine.stats()["swap_space_blocks"] == 3
    for name in "abc":
        engine.add_request(name, prompt(9, ord(name)), greedy())
    done = drain(engine)
    stats = engine.stats()
    assert stats["preemptions_recompute"] > 0
    for name in "abc":
        want = reference(prompt(9, ord(name)), greedy(), max_model_len=LENGTH)
        assert done[name].outputs[0].token_ids == want


@pytest.mark.parametrize("n", [1, 3])
def test_aborted_while_swapped_out(n: int) -> None:
    engine = swapping(11, max_num_seqs=6)
    engine.add_request("a", prompt(5), greedy(27))
    engine.add_request("b", prompt(3 * BLOCK, 1), drawn(n, 20))
    until_swapped(engine)
    engine.abort("b")
    check(engine)
    assert engine.stats()["swapped_blocks"] == engine.stats()["swapped"] == 0
    done = drain(engine)
    assert done["b"].outputs[0].finish_reason == "abort"
    assert done["a"].outputs[0].token_ids == reference(prompt(5), greedy(27), max_model_len=LENGTH)


def test_swapped_out_while_its_prompt_comes_in() -> None:
    """It goes on where it was: nothing is computed twice, its log-probabilities neither."""
    engine = swapping(9, max_num_batched_tokens=8, max_num_seqs=6)
    seen = list[int]()
    engine.ledger.watch = lambda record: seen.append(record.size.tokens)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    engine.add_request("a", prompt(7), greedy(25))
    engine.add_request("b", prompt(28, 1), params)
    done = drain(engine)
    assert engine.stats()["preemptions_swap"] > 0
    assert sum(seen) == 7 + 24 + 28 + 1
    assert done["b"].prompt_logprobs is not None and len(done["b"].prompt_logprobs) == 28
    whole = toy_engine(64, LENGTH)
    whole.add_request("b", prompt(28, 1), params)
    assert drain(whole)["b"].prompt_logprobs == done["b"].prompt_logprobs


def test_one_that_no_longer_fits_is_computed_again() -> None:
    """Somebody else holds blocks for good: the group can't ever return as it was."""
    engine = swapping(11, max_num_seqs=6)
    engine.add_request("a", prompt(5), greedy(27))
    engine.add_request("b", prompt(BLOCK, 1), drawn(3, 20))
    request = until_swapped(engine)
    engine.abort("a")
    needed = {slot for s in request.sequences for slot in s.slots}
    held = engine.pool.allocate(min(3, engine.pool.num_blocks - LENGTH // BLOCK))
    assert held is not None and engine.pool.num_available < len(needed) + 3
    engine.scheduler.schedule = partial(Scheduler.schedule, engine.scheduler)  # type: ignore[method-assign]
    done = {o.request_id: o for o in engine.step()}
    assert engine.stats()["swapped"] == engine.stats()["swapped_blocks"] == 0
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step()}
    for sample in done["b"].outputs:
        want = reference(prompt(BLOCK, 1), drawn(3, 20), index=sample.index, max_model_len=LENGTH)
        assert sample.token_ids == want
    engine.pool.release(held)
    assert engine.stats()["used_blocks"] == 0


# ── copies that fail ─────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_swapped_out_is_computed_again() -> None:
    engine = swapping()

    def fail(pairs: object) -> None:
        raise MemoryError("planted")

    engine.runtime.runner.swap_out = fail  # type: ignore[method-assign]
    for name in "abc":
        engine.add_request(name, prompt(8, ord(name)), greedy())
    done = drain(engine)
    assert engine.stats()["preemptions"] > 0 and not engine.preemption_log
    assert engine.stats()["preemptions_swap"] == 0
    assert engine.stats()["preemptions_recompute"] == engine.stats()["preemptions"]
    for name in "abc":
        want = reference(prompt(8, ord(name)), greedy(), max_model_len=LENGTH)
        assert done[name].outputs[0].token_ids == want


@pytest.mark.parametrize("caching", [True, False])
def test_what_cannot_be_swapped_in_fails_alone(caching: bool) -> None:
    engine = swapping(enable_prefix_caching=caching)
    count = itertools.count()
    swap_in = engine.runtime.runner.swap_in

    def fail_first(pairs: Any) -> None:
        if next(count) == 0:
            raise MemoryError("planted")
        swap_in(pairs)

    engine.runtime.runner.swap_in = fail_first  # type: ignore[method-assign]
    for name in "abcd":
        engine.add_request(name, prompt(8, ord(name)), greedy())
    done = drain(engine)
    failed = [name for name, output in done.items() if output.error is not None]
    assert len(failed) == 1 and isinstance(done[failed[0]].error, MemoryError)
    for name in set("abcd") - set(failed):
        want = reference(prompt(8, ord(name)), greedy(), max_model_len=LENGTH)
        assert done[name].outputs[0].token_ids == want
    assert engine.stats()["used_blocks"] == engine.stats()["swapped_blocks"] == 0

"""Policies: who starts first, who gives way to whom, who can't be kept waiting for ever."""

from __future__ import annotations

import pytest

from penstock.engine import Engine, RequestOptions
from penstock.engine.request import Status
from penstock.errors import RequestError
from penstock.sampling import SamplingParams

from .toy import BLOCK, drain, reference, toy_engine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def add(engine: Engine, name: str, length: int = 5, max_tokens: int = 4, **options: object) -> None:
    engine.add_request(
        name, prompt(length, ord(name[0])), greedy(max_tokens),
        options=RequestOptions(**options),  # type: ignore[arg-type]
    )  # fmt: skip


def running(engine: Engine) -> list[str]:
    return sorted(s.request.request_id for s in engine.scheduler.running)


def order_of_ends(engine: Engine) -> str:
    order = ""
    while engine.has_unfinished:
        order += "".join(sorted(o.request_id for o in engine.step()))
    return order


# ── the order of the queue ───────────────────────────────────────────────────────────────────────


def test_priority_goes_by_number_then_by_arrival() -> None:
    engine = toy_engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 3), ("b", 0), ("c", -2), ("d", 0), ("e", 3)):
        add(engine, name, priority=priority)
    assert order_of_ends(engine) == "cbdae"


def test_sjf_goes_by_what_is_left_of_the_prompt() -> None:
    engine = toy_engine(max_num_seqs=1, policy="sjf")
    add(engine, "z", 40, 1)
    drain(engine)
    add(engine, "a", 12)
    add(engine, "b", 9)
    add(engine, "zz", 40)  # 36 of its tokens are cached
    add(engine, "c", 9)
    assert order_of_ends(engine).replace("zz", "z") == "zbca"
    assert engine.scheduler.num_preemptions == 0


def test_edf_goes_by_deadline_and_those_without_go_last() -> None:
    clock = Clock()
    engine = toy_engine(max_num_seqs=1, policy="edf", clock=clock)
    add(engine, "a", 5, 1)
    add(engine, "b", 5, 1, ttft_slo_s=9.0)
    add(engine, "c", 5, 1, tpot_slo_s=0.1)  # of the tokens after the first
    clock.now = 5.0
    add(engine, "d", 5, 1, ttft_slo_s=3.0)
    add(engine, "e", 5, 1, ttft_slo_s=4.5)
    assert order_of_ends(engine) == "dbeac"


def test_edf_has_defaults_for_the_whole_engine() -> None:
    engine = toy_engine(max_num_seqs=1, policy="edf", ttft_slo_s=2.0, clock=Clock())
    add(engine, "a", 5, 1)
    add(engine, "b", 5, 1, ttft_slo_s=1.0)
    add(engine, "c", 5, 1, ttft_slo_s=3.0)
    assert order_of_ends(engine) == "bac"


# ── giving way ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_urgent_request_takes_the_row_of_the_least_urgent(mode: str) -> None:
    engine = toy_engine(max_num_seqs=2, policy="priority", preemption_mode=mode)
    add(engine, "a", 5, 12, priority=1)
    add(engine, "b", 5, 12, priority=2)
    engine.step()
    add(engine, "c", 5, 3, priority=0)
    engine.step()
    assert running(engine) == ["a", "c"]
    assert engine.requests["b"].sequences[0].status is (
        Status.SWAPPED if mode == "swap" else Status.WAITING
    )
    done = drain(engine)
    assert list(done) == ["c", "a", "b"]
    for name, count in (("a", 12), ("b", 12), ("c", 3)):
        want = reference(prompt(5, ord(name)), greedy(count))
        assert done[name].outputs[0].token_ids == want


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_urgent_request_takes_blocks_of_as_many_as_it_needs(mode: str) -> None:
    engine = toy_engine(
        16, max_model_len=64, policy="priority", preemption_mode=mode, enable_prefix_caching=False
    )
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        add(engine, name, 4 * BLOCK - 1, 8, priority=priority)
    engine.step()
    add(engine, "d", 7 * BLOCK, 2)
    engine.step()
    assert running(engine) == ["a", "d"]
    done = drain(engine)
    assert {name: o.metrics.preemptions for name, o in done.items() if name in "bc"} == {
        "b": 1, "c": 1,
    }  # fmt: skip
    for name in "abc":
        want = reference(prompt(4 * BLOCK - 1, ord(name)), greedy(8))
        assert done[name].outputs[0].token_ids == want


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    engine = toy_engine(16, max_model_len=64, policy="priority", enable_prefix_caching=False)
    add(engine, "a", 9 * BLOCK, 8, priority=1)
    add(engine, "b", 2 * BLOCK, 8, priority=3)
    engine.step()
    add(engine, "c", 8 * BLOCK, 8, priority=2)  # more than b has and what is left
    engine.step()
    assert running(engine) == ["a", "b"]
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_others_let_those_that_run_run(policy: str) -> None:
    engine = toy_engine(max_num_seqs=1, policy=policy)
    add(engine, "a", 20, 6)
    engine.step()
    add(engine, "b", 1, 1)
    assert order_of_ends(engine) == "ab"
    assert engine.scheduler.num_preemptions == 0


def test_a_deadline_takes_the_place_of_one_that_is_never_urgent() -> None:
    clock = Clock()
    engine = toy_engine(max_num_seqs=2, policy="edf", clock=clock)
    add(engine, "a", max_tokens=9, ttft_slo_s=100.0, tpot_slo_s=0.5)
    add(engine, "b", max_tokens=9, ttft_slo_s=1.0)  # once it has its first token, nothing is urgent
    engine.step()
    clock.now = 0.1
    add(engine, "c", max_tokens=3, ttft_slo_s=2.0)
    engine.step()
    assert running(engine) == ["a", "c"]
    assert list(drain(engine)) == ["c", "a", "b"]


def test_equals_do_not_take_each_others_places() -> None:
    """d runs in a's place though it came later; neither is urgent, so a waits."""
    engine = toy_engine(max_num_seqs=1, policy="edf", clock=Clock())
    add(engine, "a", max_tokens=6)
    add(engine, "d", max_tokens=6, ttft_slo_s=1.0)
    assert order_of_ends(engine) == "da"
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_do_not_make_each_other_give_way_in_turns(mode: str) -> None:
    """b takes a's place for its first token, after which it is never urgent and a is again.

    By rank alone a would take its place back at once, and with every other token from then on if
    deadlines moved with tokens. But who gave way waits for room.
    """
    clock = Clock()
    engine = toy_engine(max_num_seqs=1, policy="edf", preemption_mode=mode, clock=clock)
    add(engine, "a", max_tokens=10, ttft_slo_s=1.0, tpot_slo_s=8.0)
    engine.step()
    add(engine, "b", max_tokens=10, ttft_slo_s=2.0)
    engine.step()
    assert running(engine) == ["b"]
    rank = engine.scheduler.waiting.rank
    a, b = (engine.requests[name].sequences[0] for name in "ab")
    assert rank(a) < rank(b)
    seen = []
    while engine.has_unfinished:
        clock.now += 0.1
        engine.step()
        seen += running(engine)
    assert seen == sorted(seen, reverse=True)  # all of b, then all of a
    assert engine.scheduler.num_preemptions == 1


def test_each_request_takes_a_place_once_at_most() -> None:
    """However ranks are chosen: a hundred that fight for two rows."""
    engine = toy_engine(max_num_seqs=2, policy="priority")
    for i in range(100):
        add(engine, f"{i}", 3, 5, priority=-i)
        engine.step()
    done = drain(engine)
    assert 50 < engine.scheduler.num_preemptions <= 100
    assert len(done) + engine.scheduler.num_preemptions > 100
    for name, output in done.items():
        assert output.outputs[0].token_ids == reference(prompt(3, ord(name[0])), greedy(5))


# ── waiting too long ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["priority", "sjf", "edf"])
def test_nobody_starves(policy: str) -> None:
    """A stream of more urgent requests that never ends; the patient one comes after 60 s."""
    clock = Clock()
    engine = toy_engine(max_num_seqs=2, policy=policy, clock=clock)
    urgent: dict[str, object] = {"priority": {"priority": -1}, "edf": {"ttft_slo_s": 0.5}}.get(
        policy, {}
    )
    add(engine, "patient", 30, 20)
    late = {}
    for i in range(400):
        for j in range(3):
            add(engine, f"{i}-{j}", 2, 3, **urgent)
        for output in engine.step():
            late[output.request_id] = clock.now
        clock.now += 1.0
        if "patient" in late:
            break
    started = engine.scheduler  # it ran through: nobody took its place once it had waited enough
    assert started.waiting
    assert 60.0 < late["patient"] <= 60.0 + 1 + 3 + 20 + 1


def test_the_overdue_are_not_made_to_give_way() -> None:
    clock = Clock()
    engine = toy_engine(max_num_seqs=1, policy="priority", starvation_s=5.0, clock=clock)
    add(engine, "a", max_tokens=3, priority=0)
    add(engine, "b", max_tokens=8, priority=9)
    engine.step()
    clock.now = 5.5
    engine.step()
    engine.step()
    add(engine, "c", priority=-9)
    engine.step()
    assert running(engine) == ["b"]
    assert order_of_ends(engine) == "bc"


@pytest.mark.parametrize("overdue", [False, True])
def test_the_overdue_take_nobodys_place(overdue: bool) -> None:
    """c is the next to start, but b stays: its place would have been taken at once."""
    clock = Clock()
    engine = toy_engine(
        16, policy="priority", starvation_s=5.0, clock=clock, enable_prefix_caching=False
    )
    add(engine, "a", 6 * BLOCK - 2, 3, priority=0)
    add(engine, "b", 6 * BLOCK - 2, 20, priority=9)
    engine.step()
    add(engine, "c", 12 * BLOCK - 2, 2, priority=5)  # needs the blocks of both
    engine.step()
    assert running(engine) == ["a", "b"]
    clock.now = 6.0 if overdue else 4.0
    while "a" in engine.requests:
        engine.step()
    engine.step()
    assert running(engine) == (["b"] if overdue else ["c"])
    assert order_of_ends(engine) == ("bc" if overdue else "cb")


def test_waiting_is_measured_anew_after_giving_way() -> None:
    clock = Clock()
    engine = toy_engine(max_num_seqs=1, policy="priority", starvation_s=5.0, clock=clock)
    add(engine, "a", max_tokens=30, priority=1)
    engine.step()
    clock.now = 100.0
    add(engine, "b", max_tokens=30)
    engine.step()
    assert running(engine) == ["b"]
    clock.now = 104.0
    add(engine, "c")
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["c", "a"]
    clock.now = 105.5
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["a", "c"]


# ── wishes that can't be met ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("fcfs", {"priority": 1}, "priority=1 has no effect: .*'fcfs'.*policy='priority'"),
        ("edf", {"priority": -1}, "scheduled by policy='edf'"),
        ("sjf", {"ttft_slo_s": 0.5}, "ttft_slo_s=0.5 has no effect.*start .*policy='edf'"),
        ("priority", {"tpot_slo_s": 2.0}, "tpot_slo_s=2.0 has no effect"),
    ],
)
def test_a_wish_that_the_policy_cannot_heed(
    policy: str, options: dict[str, object], message: str
) -> None:
    engine = toy_engine(policy=policy)
    with pytest.raises(RequestError, match=message):
        add(engine, "a", **options)
    assert not engine.has_unfinished and not engine.scheduler.has_work
    add(engine, "a", priority=0, ttft_slo_s=None, tpot_slo_s=None)  # which asks for nothing
    assert list(drain(engine)) == ["a"]

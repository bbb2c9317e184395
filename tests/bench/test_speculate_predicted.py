"""The ledger's prediction, against sums done by hand, and the passes that it rests on."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.bench.speculate import passes as timed
from penstock.bench.speculate.expected import Place
from penstock.bench.speculate.passes import Like, Passes
from penstock.bench.speculate.predicted import PlainSteps, predicted_speedup
from penstock.bench.speculate.runs import Round, Step
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.hardware import Peaks
from penstock.roofline import Cost, StepRecord, StepSize
from penstock.runtime import Runtime, load_runtime
from penstock.sampling import SamplingParams

PEAKS = Peaks(1e6, 1e9, 0.0, 2, "2026-11-22T00:00:00+00:00")
"""A byte takes a microsecond."""

MS = 1e-3


def cost(floor_ms: float) -> Cost:
    return Cost(int(floor_ms * 1000), 0, {})


def step(
    forward: float, sample: float, host: float, *, floor: float, drafted: int = 0,
    draft: float = 0.0, prompt: bool = False,
) -> Step:  # fmt: skip
    """Times in milliseconds."""
    size = StepSize([1 + drafted], [30], 1 + drafted, drafted)
    if prompt:
        size = StepSize([9], [9], 1, prefill_tokens=9)
    whole = (forward + sample + host + draft) * MS
    record = StepRecord(
        0.0, whole, draft * MS, host * MS, 0.0, forward * MS, sample * MS, 0.0, 0.0, 0.0,
        size, cost(floor), None,
    )  # fmt: skip
    return Step(record, 1 + drafted, whole)


def a_round() -> Round:
    """Plain steps at half their floor; a draft of two between two plain steps."""
    prompt = step(50, 1, 1, floor=20, prompt=True)
    plain = [prompt, step(12, 2, 6, floor=5), *[step(10, 1, 4, floor=5)] * 3]
    drafted = [
        prompt,
        step(99, 99, 99, floor=6, drafted=2, draft=3),
        step(99, 99, 99, floor=5, draft=1),
        step(99, 99, 99, floor=5, draft=1),
    ]
    found = Round(plain, drafted)
    for rows, forward, sample in ((1, 11, 1.5), (3, 24, 3.5)):
        found.passes.forward[rows] += [forward * MS] * 3
        found.passes.sampling[rows] += [sample * MS] * 3
    found.passes.costs.update({1: cost(5.5), 3: cost(6)})
    return found


def test_a_prediction_by_hand() -> None:
    """Nothing of the steps with drafts goes in but their sizes, their floors and their drafting."""
    plain = PlainSteps.of(a_round(), 1, PEAKS)
    assert plain is not None
    assert (plain.whole_s, plain.anew_s) == (pytest.approx(15 * MS), pytest.approx(6 * MS))
    assert plain.share == pytest.approx(0.5)
    places = [Place(drafts=1, tested=4, accepted=3), Place(drafts=1, tested=2, accepted=1)]
    given = (1 + 0.75 + 0.75 * 0.5) + 1 + 1
    verifies = 6 / (6 / 24) + 3.5 + 6 + 3  # its floor ÷ the share of three rows, …, drafting
    behind = 5 / (5.5 / 11) + 1.5 + 6 + 1
    again = 5 / 0.5 + 1 + 4 + 1
    want = given * 15 / (verifies + behind + again)
    assert predicted_speedup([a_round()], 1, PEAKS, places) == pytest.approx(want)
    assert predicted_speedup([a_round()] * 3, 1, PEAKS, places) == pytest.approx(want)


def test_rounds_without_a_full_batch_do_not_count() -> None:
    short = Round([], [])
    assert PlainSteps.of(short, 1, PEAKS) is None
    assert predicted_speedup([short, a_round()], 1, PEAKS, []) > 0.0


def test_rows_between_those_that_were_timed() -> None:
    passes = a_round().passes
    assert passes.shares(PEAKS) == {1: pytest.approx(0.5), 3: pytest.approx(0.25)}
    assert passes.share(2, PEAKS) == pytest.approx(0.375)
    assert passes.sample_s(2) == pytest.approx(2.5 * MS)
    both = passes.plus(a_round().passes)
    assert len(both.forward[3]) == 6 and both.shares(PEAKS) == passes.shares(PEAKS)


def test_the_most_frequent_rows_are_timed() -> None:
    counts = [1, 1, 2, *[n for n in range(3, 20) for _ in range(n)]]
    assert timed._frequent(counts, 1) == list(range(12, 20))
    assert timed._frequent([3, 3, 3], 3) == []


def loaded(**chosen: Any) -> Runtime:
    return load_runtime(
        EngineConfig.of(model="stories", max_model_len=64, max_num_seqs=3, **chosen)
    )


@pytest.mark.parametrize(("kv_cache_dtype", "past"), [("auto", True), ("kivi", False)])
def test_passes(kv_cache_dtype: Any, past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences apart from each other, and requests decode behind them as they did before."""
    runtime = loaded(kv_cache_dtype=kv_cache_dtype)
    engine = Engine(EngineConfig.of(model="stories", max_num_seqs=3), runtime)

    def decoded() -> list[int]:
        engine.add_request("a", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=12))
        done = []
        while engine.has_unfinished:
            done += [one for one in engine.step() if one.finished]
        return list(done[0].outputs[0].token_ids)

    before = decoded()
    like = Like(3, [5, 6, 7], 40, SamplingParams(temperature=0.8))
    found = timed._step(7, like, runtime)
    assert found.query_start.tolist() == [0, 3, 5, 7]
    assert found.context_len.tolist() == ([40, 39, 39] if past else [3, 2, 2])
    assert len(set(found.slots.tolist())) == 7
    assert not set(found.block_table[0].tolist()) & set(found.block_table[1:].flatten().tolist())
    passes = Passes()
    monkeypatch.setattr(timed, "SPENT_S", 0.0)
    passes.time(runtime, engine.ledger.costs, [3, 7, 7, 9], like)
    assert {rows: len(took) for rows, took in passes.forward.items()} == {3: 3, 7: 3, 9: 3}
    assert all(s > 0.0 for took in passes.sampling.values() for s in took)
    assert passes.costs[9].flops > passes.costs[3].flops
    assert decoded() == before

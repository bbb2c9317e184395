"""The engine keeps its ledger, and tells each request the floor of the steps it was in."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock import LLM
from penstock.engine import Engine, RequestOutput
from penstock.hardware import Peaks, detect, save_peaks
from penstock.kernels import native
from penstock.roofline import StepRecord, StepSize
from penstock.sampling import SamplingParams

from .guessing import Guesser, speculate
from .toy import drain, toy_engine

PEAKS = Peaks(1e9, 1e10, 0.0, 1, "")


def greedy(tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0 if n == 1 else 1.0, max_tokens=tokens, n=n)


def test_a_request_has_the_floor_of_its_own_steps() -> None:
    """The second comes later and leaves earlier; samples of one request count a step once."""
    engine = toy_engine()
    engine.ledger.peaks = PEAKS
    records: list[StepRecord] = []
    engine.ledger.watch = records.append
    done: dict[str, RequestOutput] = {}
    engine.add_request("long", [1, 2, 3], greedy(6, n=2))
    engine.step()
    engine.add_request("short", [4, 5], greedy(2))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert len(records) == 6 == engine.stats()["steps"]
    for name, own in (("long", records), ("short", records[1:3])):
        metrics, floors = done[name].metrics, [r.floor for r in own if r.floor is not None]
        assert metrics.floor_s == pytest.approx(sum(f.seconds for f in floors))
        assert metrics.steps_s == pytest.approx(sum(r.seconds for r in own))
        assert metrics.achieved == pytest.approx(metrics.floor_s / metrics.steps_s)
        assert metrics.bound == "memory"
    assert [len(r.size.queries) for r in records] == [1, 3, 3, 2, 2, 2]
    assert [r.size.is_prefill for r in records] == [True, True, False, False, False, False]


def records_of(engine: Engine) -> list[StepRecord]:
    """What the ledger records from here on."""
    found: list[StepRecord] = []
    engine.ledger.watch = found.append
    return found


def test_a_step_says_what_it_gave_not_what_it_guessed() -> None:
    engine = toy_engine()
    records = records_of(engine)
    guesses = speculate(engine, Guesser(lambda tokens, state: 3, wrong=1.0))
    engine.add_request("it", [1, 2, 3], greedy(12))
    made = len(drain(engine)["it"].outputs[0].token_ids)
    assert guesses.counts.draft_tokens > 12 > guesses.counts.accepted_tokens
    assert made == sum(r.generated for r in records) == engine.ledger.total.generated
    decode = engine.ledger.decode
    assert decode.generated == made - 1 < decode.tokens
    assert decode.tokens_per_s == pytest.approx((made - 1) / decode.seconds)


def test_the_last_token_of_a_prompt_is_prefill() -> None:
    """Whether it is a chunk of its own, or all that the cache lacked."""
    engine = toy_engine(max_num_batched_tokens=8)
    records = records_of(engine)
    engine.add_request("in chunks", range(2, 11), greedy(3))
    drain(engine)
    assert [list(r.size.queries) for r in records] == [[8], [1], [1], [1]]
    assert [r.size.prefill_tokens for r in records] == [8, 1, 0, 0]
    records.clear()
    engine.add_request("from the cache", range(2, 11), greedy(2))
    drain(engine)
    assert [list(r.size.queries) for r in records] == [[1], [1]]
    assert [r.size.is_prefill for r in records] == [True, False]


def test_tokens_that_a_grammar_forced_are_no_prefill() -> None:
    llm = LLM("stories", max_num_seqs=2)
    records = records_of(llm.engine)
    form = {"regex": "the quick [a-z]{3} jumps over the lazy [a-z]{3} by the river"}
    (output,) = llm.generate("Once", SamplingParams(structured_outputs=form, max_tokens=40, seed=1))
    assert llm.stats()["jumped_tokens"] > 0
    assert max(r.size.tokens for r in records[1:]) > 1
    assert [r.size.is_prefill for r in records] == [True] + [False] * (len(records) - 1)
    assert sum(r.generated for r in records) == len(output.outputs[0].token_ids)


def test_a_plain_steps_time_is_learnt_from_plain_steps() -> None:
    """Steps with forced tokens are longer: what drafts gain isn't measured by them."""
    engine = toy_engine()
    guesses = speculate(engine, Guesser(lambda tokens, state: 3), adaptive=True)
    seen: list[tuple[int, int]] = []
    guesses.controller.saw_step = (  # type: ignore[method-assign]
        lambda batch, drafted, *_, **__: seen.append((batch, drafted))
    )
    for size in (
        StepSize([1, 1], [8, 9], 2),
        StepSize([5, 1], [12, 9], 6, drafted=4),
        StepSize([4, 1], [12, 9], 2),  # three forced
        StepSize([1, 1], [8, 9], 2, prefill_tokens=1),
    ):
        guesses.saw_step(engine.ledger.record(size, [0.0] * 6))
    assert seen == [(2, 0), (2, 4)]


def test_what_is_computed_again_is_prefill() -> None:
    engine = toy_engine(16, enable_prefix_caching=False, max_num_batched_tokens=8)
    for name in "abc":
        engine.add_request(name, [ord(name) - 90, 3, 4], greedy(20))
    done = drain(engine)
    assert engine.stats()["preemptions"] > 0
    again = sum(entry.tokens for entry in engine.preemption_log)
    # a sequence that starts again brings its last token along, which wasn't computed before
    starts = engine.stats()["preemptions"]
    assert 9 + again <= engine.ledger.total.prefill_tokens <= 9 + again + starts
    assert all(len(done[name].outputs[0].token_ids) == 20 for name in "abc")


def test_a_floor_that_came_late_is_of_its_own_steps() -> None:
    engine = toy_engine()
    engine.ledger.peaks = None
    records = records_of(engine)
    engine.add_request("it", [1, 2, 3], greedy(8))
    for _ in range(4):
        engine.step()
    engine.ledger.peaks = PEAKS
    metrics = drain(engine)["it"].metrics
    known = sum(r.seconds for r in records if r.floor is not None)
    assert 0 < known < metrics.steps_s and metrics.floor_s is not None
    assert metrics.achieved == pytest.approx(metrics.floor_s / known)
    assert metrics.achieved == pytest.approx(engine.ledger.total.share)


def test_no_peaks_no_floor() -> None:
    engine = toy_engine()
    engine.ledger.peaks = None
    engine.add_request("it", [1, 2, 3], greedy(3))
    (metrics,) = {id(o.metrics): o.metrics for _ in range(3) for o in engine.step()}.values()
    assert (metrics.floor_s, metrics.achieved, metrics.bound) == (None, None, None)
    assert engine.ledger.total.steps == 3


def test_waiting_counts_only_while_there_are_requests() -> None:
    engine = toy_engine()
    engine.add_request("a", [1, 2, 3], greedy(2))
    time.sleep(0.01)
    engine.step()
    time.sleep(0.02)
    engine.step()
    assert engine.ledger.prefill.wait_s >= 0.01 and engine.ledger.decode.wait_s >= 0.02
    waited = engine.ledger.total.wait_s
    time.sleep(0.02)  # nobody is there
    engine.add_request("b", [1, 2, 3], greedy(1))
    engine.abort("b", report=False)
    time.sleep(0.02)
    engine.add_request("c", [1, 2, 3], greedy(1))
    engine.step()
    assert engine.ledger.total.wait_s < waited + 0.02


def test_an_engine_never_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the peaks that are kept; where there are none, floors stay unknown."""

    def measure(*arguments: object) -> Peaks:
        raise AssertionError("measured")

    monkeypatch.setattr(sys.modules["penstock.roofline.peaks"], "measure", measure)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert toy_engine().ledger.peaks is None
    kept = replace(PEAKS, threads=torch.get_num_threads())
    save_peaks(detect(), kept, "native" if native.handle else "reference")
    assert toy_engine().ledger.peaks == kept

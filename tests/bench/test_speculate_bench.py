"""`penstock bench speculate`: the same outputs, and what is counted, timed and expected."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from rich.console import Console
from tests.models.stories import CONFIG, LAYERS

from penstock.bench.speculate import benchmark, floors, runs
from penstock.bench.speculate.benchmark import Options
from penstock.bench.speculate.planted import Planted, PlantedProposer
from penstock.bench.speculate.prompts import Workload
from penstock.bench.speculate.result import SpeculateResult
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.hardware import Peaks
from penstock.roofline import CostModel, StepSize, floor_s
from penstock.runtime import Runtime, load_runtime
from penstock.sampling import SamplingParams, SequenceSampling
from penstock.speculate import Draft, Wish

PEAKS = Peaks(2e10, 1e11, 0.0, 2, "2026-11-22T00:00:00+00:00")
WORKLOAD = Workload("three", ["Once upon a time", "One day a cat", "Tom and"])
PLANTED = Planted(0.7, 0.0, 4, adaptive=False)


def nothing(*_: object) -> None:
    """Instead of showing progress."""


@pytest.fixture(autouse=True)
def _known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "measure_on", lambda device, hardware: PEAKS)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    """Of the embedded model, for up to three at once and any drafts without a model."""
    return load_runtime(options(PLANTED, batch_size=3).config("stories", [WORKLOAD]))


def options(drafts: Planted | SpeculativeConfig, **chosen: Any) -> Options:
    usual: dict[str, Any] = {
        "max_tokens": 24, "batch_size": 1, "temperature": 0.0, "rounds": 2, "seed": 0
    }  # fmt: skip
    return Options(drafts, **{**usual, **chosen})


def run(
    runtime: Runtime, drafts: Planted | SpeculativeConfig, **chosen: Any
) -> tuple[SpeculateResult, dict[str, Any]]:
    asked = options(drafts, **chosen)
    config = asked.config("stories", [WORKLOAD])
    result = benchmark.run(config, runtime, [WORKLOAD], asked, nothing)
    told = json.loads(json.dumps(result.as_dict()))
    return result, told["results"]["workloads"][0]


def shown(result: SpeculateResult) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(result.table())
    return out.getvalue()


@pytest.mark.parametrize(
    ("drafts", "chosen"),
    [
        (PLANTED, {}),
        (PLANTED, {"temperature": 1.0, "batch_size": 2}),
        (Planted(0.7, 0.1, 3), {"batch_size": 3}),
        (SpeculativeConfig("self", 3, adaptive=False), {}),
        (SpeculativeConfig("self", 3), {"temperature": 0.8, "batch_size": 3}),
    ],
    ids=str,
)
def test_outputs_are_equal_and_figures_agree(
    runtime: Runtime, drafts: Planted | SpeculativeConfig, chosen: dict[str, Any]
) -> None:
    result, told = run(runtime, drafts, **chosen)
    batch = chosen.get("batch_size", 1)
    assert result.problems == [] and told["outputs_equal"] is True
    assert told["requests"] == (4 if batch == 2 else 3)  # the first again, for a full wave
    (figures,) = result.workloads
    log, found = figures.runs.log, told["acceptance"]
    assert found["draft_tokens"] == sum(n * times for n, times in figures.lengths.items())
    verified = [step.record.size.drafted for one in figures.runs.rounds for step in one.drafted]
    assert sum(verified) == log.draft_tokens  # each draft of each round, the warm-up's none
    for a_round in figures.runs.rounds:
        tokens = [sum(step.generated for step in side) for side in (a_round.plain, a_round.drafted)]
        assert tokens[0] == tokens[1] == told["tokens"]
        assert not any(step.record.size.drafted for step in a_round.plain)
    assert [one["accepted"] for one in found["by_position"]] == (
        log.accepted_at + [0] * (len(found["by_position"]) - len(log.accepted_at))
    )
    assert told["control"]["adaptive"] is drafts.adaptive
    if not drafts.adaptive:
        assert told["control"]["share_of_steps_with_drafts"] > 0.8
        assert found["mean_length"] == pytest.approx(1 + log.accepted_tokens / log.drafts)


def test_outputs_that_are_given_are_said(runtime: Runtime) -> None:
    """By a model that would say something else; n-grams guess it from the prompt."""
    words = list(range(100, 110))
    given = Workload("given", [words * 2, [5, 6, 7], words], [words * 2, None, [9] * 30])
    asked = options(SpeculativeConfig("ngram", 4, adaptive=False), max_tokens=24)
    config = asked.config("stories", [given])
    result = benchmark.run(config, runtime, [given], asked, nothing)
    assert result.problems == []
    (figures,) = result.workloads
    told = figures.as_dict()
    assert told["outputs_given"] == 2
    assert "all equal; 2 were given beforehand" in shown(result)
    assert told["acceptance"]["alpha"] > 0.7
    waves = runs.in_waves([words, [5]], 1, 24, 0.0, 3, [[9] * 30, None])
    assert [job.params.max_tokens for wave in waves for job in wave] == [24, 24]
    meter = runs._meter(config, runtime, {3: [9] * 30})
    assert runs._run(meter, waves[0], []) == [[9] * 24]
    assert runs._run(meter, waves[1], []) != [[9] * 24]


@pytest.mark.parametrize(
    ("output", "words"),
    [([5], "has 1 tokens"), ([5, 10**6], "token 1000000, but"), ([5, -1], "-1")],
)
def test_outputs_that_nobody_can_say(runtime: Runtime, output: list[int], words: str) -> None:
    asked = options(PLANTED)
    given = Workload("given", [[5, 6, 7]], [output])
    with pytest.raises(ConfigError, match=words):
        benchmark.run(asked.config("stories", [given]), runtime, [given], asked, nothing)


def test_planted_rates(runtime: Runtime) -> None:
    """1 and 0 exactly, and in between what a coin would show."""
    _, all_right = run(runtime, replace(PLANTED, rate=1.0))
    assert all_right["acceptance"]["rate"] == 1.0 and all_right["acceptance"]["alpha"] == 1.0
    assert {one["conditional"] for one in all_right["acceptance"]["by_position"]} == {1.0}
    assert all_right["expected"]["floors"] > 2.0  # five tokens for little more than one's bytes
    _, none_right = run(runtime, replace(PLANTED, rate=0.0))
    assert none_right["acceptance"]["accepted_tokens"] == 0
    assert none_right["acceptance"]["alpha"] == 0.0
    assert none_right["acceptance"]["mean_length"] == 1.0
    assert 0.3 < none_right["expected"]["geometric"] < 1.0  # for what drafting took
    assert none_right["expected"]["floors"] < 1.0
    _, some = run(runtime, PLANTED, rounds=4)
    tested = (
        sum(one["accepted"] for one in some["acceptance"]["by_position"])
        / some["acceptance"]["alpha"]
    )
    assert abs(some["acceptance"]["alpha"] - 0.7) < 4 * (0.7 * 0.3 / tested) ** 0.5


def test_planted_drafts_take_the_time_they_are_told_to(runtime: Runtime) -> None:
    _, told = run(runtime, Planted(1.0, 5.0, 2, adaptive=False), rounds=1)
    assert told["costs"]["drafting_by_token"] is True
    assert told["costs"]["drafting_of_a_plain_step"] > 1.0  # five plain steps, were these as slow
    assert told["break_even_acceptance"] is None  # three tokens for at least eleven steps
    assert told["expected"]["floors"] == pytest.approx(3 / 11, rel=0.1)


def test_a_planted_draft() -> None:
    def draft(rate: float, tokens: list[int], limit: int) -> Draft:
        sampling = SequenceSampling(SamplingParams(temperature=0.0), [1], 10, 0, frozenset())
        known = [[1, 2, 3, 4, 5], [1, 2, 7, 8]]
        proposer = PlantedProposer(known, rate, range(2, 10), 0)
        (found,) = proposer.propose([Wish(object(), tokens, sampling, [0], limit)])
        return found

    assert draft(1.0, [1, 2], 2).tokens == [3, 4]
    assert draft(1.0, [1, 2, 7], 3).tokens == [8]  # the other began alike, and it ends there
    assert draft(1.0, [9], 3).tokens == []
    wrong = draft(0.0, [1], 4).tokens
    assert len(wrong) == 4 and all(a != b for a, b in zip(wrong, [2, 3, 4, 5], strict=True))


def test_a_sequence_that_turns_out_another() -> None:
    """Two began alike: once they part, the right one is followed."""
    sampling = SequenceSampling(SamplingParams(temperature=0.0), [1], 10, 0, frozenset())
    proposer = PlantedProposer([[1, 2, 3, 4], [1, 2, 7, 8]], 1.0, range(9), 0)
    key = object()
    first = proposer.propose([Wish(key, [1, 2], sampling, [0], 1)])
    later = proposer.propose([Wish(key, [1, 2, 7], sampling, [0], 1)])
    assert [first[0].tokens, later[0].tokens] == [[3], [8]]
    proposer.forget(key)
    assert not proposer._found


def test_an_output_that_differs_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = runs._run, Random(0)

    def run_wrong(meter: Any, wave: Any, steps: Any) -> list[list[int]]:
        outputs = real(meter, wave, steps)
        if meter.engine.speculation is not None and wave[0].prompt[-1] == last:
            outputs[0] = [*outputs[0][:-1], rng.randrange(9)]
        return outputs

    assert runtime.tokenizer is not None
    last = runtime.tokenizer.encode("One day a cat")[-1]
    monkeypatch.setattr(runs, "_run", run_wrong)
    result, told = run(runtime, PLANTED, rounds=1)
    assert told["differing"] == [2] and told["outputs_equal"] is False
    assert result.problems == ["three 2: another output with drafts"]


def test_guessing_that_fails_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no idea")

    monkeypatch.setattr(PlantedProposer, "propose", fail)
    result, told = run(runtime, PLANTED, rounds=1)
    assert told["outputs_equal"] is True and "no idea" in result.problems[0]
    assert told["acceptance"]["rate"] is None and told["acceptance"]["by_position"] == []
    assert told["break_even_acceptance"] is None and told["best_length"] is None
    assert told["control"]["share_of_time_with_drafts"] == 0.0
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(result.table())
    shown = console.export_text()
    assert "no draft took part in the timed runs" in shown and "guessing has failed" in shown


def test_outputs_too_short_to_time(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="before 1 of them decoded together"):
        run(runtime, PLANTED, max_tokens=1)


# ── floors and memory ────────────────────────────────────────────────────────────────────────


def test_passes_of_a_draft() -> None:
    """Sequences of 10 and 20 tokens, with 2 and 1 guesses: two passes, the second of one row."""
    size = StepSize([3, 2], [12, 21], 5, drafted=3)
    assert list(floors.passes_of(size)) == [StepSize([1, 1], [10, 20], 2), StepSize([1], [11], 1)]
    assert not list(floors.passes_of(StepSize([1, 1], [12, 21], 2)))


def test_floor_of_drafting(runtime: Runtime) -> None:
    """Of the first layers: less than the target's by the others' weights."""
    model = runtime.model
    drafts = SpeculativeConfig("self", 2, draft_layers=2)
    config = options(drafts).config("stories", [WORKLOAD])
    size = StepSize([3], [12], 3, drafted=2)
    found = floors.draft_floor(config, runtime, None)(size, PEAKS)
    whole = CostModel(model.spec.decoder, model.model.formats, runtime.layout, model.dtype)
    passes = [StepSize([1], [context], 1) for context in (10, 11)]
    spared = (
        sum(model.model.layers[i].attention.qkv.weight.nbytes for i in range(2, LAYERS))
        / PEAKS.read_bytes_per_s
    )
    most = sum(floor_s(whole.cost(one), PEAKS) for one in passes)
    assert 0.0 < found < most - 2 * spared
    share = floors.draft_floor(config, runtime, Planted(0.5, 0.25))(size, PEAKS)
    assert share == pytest.approx(most / 4)
    ngram = replace(config, speculative=SpeculativeConfig("ngram"))
    assert floors.draft_floor(ngram, runtime, None)(size, PEAKS) == 0.0


def test_memory_of_both_models(tmp_path: Any) -> None:
    drafts = SpeculativeConfig("draft_model", 2, model="stories", quantization="w4a8")
    config: EngineConfig = options(drafts).config("stories", [WORKLOAD], quantization="w8a8")
    told = floors.memory_of(load_runtime(config))
    size = 2 * 2 * LAYERS * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]  # K and V, bfloat16
    assert told["draft"]["kv_bytes_per_token"] == told["target"]["kv_bytes_per_token"] == size
    assert 0 < told["draft"]["weight_bytes"] < told["target"]["weight_bytes"]


def test_memory_of_one_model(runtime: Runtime) -> None:
    told = floors.memory_of(runtime)
    parameters = sum(tensor.nbytes for tensor in runtime.model.model.parameters())
    assert told["target"]["weight_bytes"] >= parameters
    assert set(told["draft"].values()) == {0}

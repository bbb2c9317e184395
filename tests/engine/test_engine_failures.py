"""What raises in one request stays with it: the others' tokens are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.sampling import Sampled, Sampler, SamplingParams, SequenceSampling
from penstock.step import KV, Step

from .toy import GREEDY, Toy, drain, reference, toy_runtime

BAD = 61
KINDS = [TypeError, AssertionError, KeyError, MemoryError, RuntimeError, ZeroDivisionError]


def engine_on(forward: Any, **kwargs: Any) -> Engine:
    return Engine(EngineConfig.of(max_num_seqs=8, **kwargs), toy_runtime(forward=forward))


class Faulty(Toy):
    """Raises after it has written to the cache, where `when` says so."""

    def __init__(self, when: Any, kind: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self.when, self.kind, self.raised = when, kind, 0

    def __call__(self, step: Step, kv: KV) -> torch.Tensor:
        logits = super().__call__(step, kv)
        if self.when(step):
            self.raised += 1
            raise self.kind("planted")
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_forward_raises_for_one(kind: type[Exception]) -> None:
    engine = engine_on(Faulty(lambda step: bool((step.tokens == BAD).any()), kind))
    items = {"a": [1, 2, 3], "bad": [4, BAD], "b": [5] * 9}
    for name, prompt in items.items():
        engine.add_request(name, prompt, GREEDY)
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "error"
    assert isinstance(done["bad"].error, kind)
    for name in ("a", "b"):
        assert done[name].outputs[0].token_ids == reference(items[name], GREEDY)
        assert done[name].error is None
    assert engine.pool.num_used == 0


def test_every_shared_step_raises_even_those_that_copy_blocks() -> None:
    """Five samples of one prompt write to copies of its last block while each runs alone."""
    forward = Faulty(lambda step: step.num_sequences > 1)
    engine = engine_on(forward)
    params = SamplingParams(n=5, temperature=0.8, seed=3, max_tokens=12)
    prompt = [7, 8, 9, 10, 11, 12]
    engine.add_request("it", prompt, params)
    done = drain(engine)["it"]
    assert forward.raised > 10
    for sample in done.outputs:
        assert sample.token_ids == reference(prompt, params, index=sample.index)


def test_a_copy_that_fails_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(Toy())
    copy = engine.runtime.runner.copy
    failures = [MemoryError("planted")]

    def once(pairs: Sequence[tuple[int, int]]) -> None:
        if failures:
            raise failures.pop()
        copy(pairs)

    monkeypatch.setattr(engine.runtime.runner, "copy", once)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("forks", [7, 8, 9], SamplingParams(n=3, temperature=0.8, seed=3))
    done = drain(engine)
    assert isinstance(done["forks"].error, MemoryError)
    assert done["a"].outputs[0].token_ids == reference([1, 2, 3], GREEDY)
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_raises_for_one(kind: type[Exception]) -> None:
    class Broken(Sampler):
        def __call__(self, logits: torch.Tensor, rows: Sequence[SequenceSampling]) -> Sampled:
            if any(row.params.seed == 13 for row in rows):
                with torch.inference_mode():
                    logits.fill_(0.0)  # it may have overwritten them before it raised
                raise kind("planted")
            return super().__call__(logits, rows)

    engine = engine_on(Toy())
    engine.sampler = Broken(64)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("bad", [4], SamplingParams(seed=13))
    done = drain(engine)
    assert isinstance(done["bad"].error, kind)
    assert done["a"].outputs[0].token_ids == reference([1, 2, 3], GREEDY)


def test_detokenizer_raises_for_one() -> None:
    class Broken:
        text = ""

        def append(self, tokens: object) -> None:
            raise LookupError("planted")

        def finish(self) -> None:
            raise LookupError("planted again")

    engine = engine_on(Toy())
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("bad", [4], SamplingParams(temperature=0.9, seed=1, n=2))
    engine.requests["bad"].sequences[1].detokenizer = Broken()  # type: ignore[assignment]
    done = drain(engine)
    assert [s.finish_reason for s in done["bad"].outputs] == ["error", "error"]
    assert isinstance(done["bad"].error, LookupError)
    assert done["a"].outputs[0].token_ids == reference([1, 2, 3], GREEDY)


def test_the_engine_goes_on_after_all_failed() -> None:
    forward = Faulty(lambda step: forward.raised < 4)
    engine = engine_on(forward)
    for i in range(3):
        engine.add_request(str(i), [i + 1], GREEDY)
    assert [o.outputs[0].finish_reason for o in drain(engine).values()] == ["error"] * 3
    engine.add_request("later", [9], GREEDY)
    assert drain(engine)["later"].outputs[0].token_ids == reference([9], GREEDY)


def test_a_newcomer_leaves_room_to_grow() -> None:
    """Without it, the newcomer's blocks would be taken back as soon as the others need one."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    engine = Engine(EngineConfig.of(max_num_seqs=8), toy_runtime(num_blocks=9, max_model_len=32))
    for i in range(4):  # each needs 2 blocks for its prompt and 5 in the end
        engine.add_request(str(i), [i + 1] * 7, params)
    engine.step()
    assert len(engine.scheduler.running) == 3  # the fourth would leave 1 block to the three
    done = drain(engine)
    assert len(done) == 4
    for i in range(4):
        assert done[str(i)].outputs[0].token_ids == reference([i + 1] * 7, params, max_model_len=32)


def test_a_gpu_that_is_lost_ends_the_engine() -> None:
    """No request can be computed any more: none is tried alone, and whoever steps hears of it."""
    calls = []

    def lost(step: Step, kv: KV) -> torch.Tensor:
        calls.append(step)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = engine_on(lost)
    for i in range(3):
        engine.add_request(str(i), [1 + i, 2, 3], GREEDY)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        engine.step()
    assert len(calls) == 1

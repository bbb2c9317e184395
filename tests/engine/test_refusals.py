"""What is refused, aborted or poisoned, beside others that go on; and what is measured."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput
from penstock.errors import (
    InvalidPromptError,
    InvalidSamplingError,
    ModelOutputError,
    RequestError,
)
from penstock.sampling import SamplingParams
from penstock.step import KV, Step

from .toy import VOCAB, Toy, check, drain, reference, run_one, toy_engine, toy_runtime, watch

PROMPT = [10, 20, 30, 40, 50]


def greedy(max_tokens: int | None = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_nan_stays_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    class Poisoned(Toy):
        """Of the steps so far, the fifth spoils whoever has three computed tokens in it."""

        def __call__(self, step: Step, kv: KV) -> Tensor:
            logits = super().__call__(step, kv)
            for row in np.flatnonzero(step.context_len.numpy() == 7):
                logits[row, 3] = float("nan")
            return logits

    engine = Engine(EngineConfig.of(max_num_seqs=8), toy_runtime(forward=Poisoned()))
    watch(engine)
    prompts = {"bad": [1, 2, 3], "a": [4] * 9, "b": [5] * 10, "also bad": [6] * 5}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(n=2, seed=1) if " " in name else greedy())
    with caplog.at_level(logging.WARNING, "penstock"):
        done = drain(engine)
    for name, prompt in prompts.items():
        reasons = {sample.finish_reason for sample in done[name].outputs}
        if "bad" in name:
            assert reasons == {"error"}
            assert isinstance(done[name].error, ModelOutputError)
            assert "NaN" in str(done[name].error)
        else:
            assert reasons == {"length"}
            assert done[name].outputs[0].token_ids == reference(prompt, greedy())
    assert "Request bad failed" in caplog.text
    assert engine.pool.num_used == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "The prompt is empty"),
        ([1] * 64, r"64 tokens, but .* only 63 fit into max_model_len=64"),
        ([1, VOCAB], r"Token id 64 is outside the vocabulary of 64"),
        ([1, -1], r"Token id -1 is outside"),
        ([2**70], "integer token ids"),
        ([1.0, 2.0], "not float64"),
        ([True], "not bool"),
        (["a"], "integer token ids"),
        ([[1, 2]], r"of shape \[1, 2\]"),
        ([[1], [2, 3]], "must be a list of token ids"),
        ([None], "not object"),
    ],
)
def test_bad_prompts_while_others_run(prompt: Any, message: str) -> None:
    engine = toy_engine()
    engine.add_request("good", PROMPT, greedy())
    engine.step()
    with pytest.raises(InvalidPromptError, match=message):
        engine.add_request("bad", prompt, greedy())
    assert list(engine.requests) == ["good"]
    assert drain(engine)["good"].outputs[0].token_ids == reference(PROMPT, greedy())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias holds token id 64"),
        ({"stop_token_ids": [99]}, "stop_token_ids holds token id 99"),
        ({"allowed_token_ids": [64]}, "allowed_token_ids holds token id 64"),
    ],
)
def test_ids_beyond_the_vocabulary(params: dict[str, Any], message: str) -> None:
    engine = toy_engine()
    with pytest.raises(InvalidSamplingError, match=message):
        engine.add_request("bad", PROMPT, greedy(**params))
    assert not engine.has_unfinished and not engine.scheduler.has_work


def test_an_id_is_in_use_until_its_last_output() -> None:
    """Else an aborted request's end would reach the one that follows under its name."""
    engine = toy_engine()
    engine.add_request("it", PROMPT, greedy())
    with pytest.raises(RequestError, match="'it' is already in use"):
        engine.add_request("it", [1], greedy())
    engine.step()
    engine.abort("it")
    with pytest.raises(RequestError, match="'it' is already in use"):
        engine.add_request("it", [1], greedy())
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == reference(PROMPT, greedy(1))
    engine.add_request("it", [1], greedy())
    engine.abort("it", report=False)
    engine.add_request("it", PROMPT, greedy())
    assert drain(engine)["it"].outputs[0].token_ids == reference(PROMPT, greedy())


def test_aborts_wherever_it_is() -> None:
    """Waiting, with its samples reserved, running; unknown and ended ids are nothing."""
    engine = toy_engine(max_num_seqs=4, max_num_batched_tokens=4)
    engine.add_request("running", [1], greedy())
    engine.add_request("forking", [2] * 12, SamplingParams(n=3))
    engine.add_request("waiting", [3], greedy())
    engine.step()
    for name in ("running", "forking", "waiting", "unknown", "running"):
        engine.abort(name)
        check(engine)
    assert engine.pool.num_used == 0
    assert {output.request_id for output in engine.step()} == {"running", "forking", "waiting"}
    assert engine.step() == [] and not engine.has_unfinished


def test_metrics() -> None:
    slow = Toy()

    def forward(step: Step, kv: KV) -> Tensor:
        time.sleep(0.02)
        return slow(step, kv)

    engine = Engine(EngineConfig.of(max_num_seqs=1), toy_runtime(forward=forward))
    engine.add_request("a", PROMPT, greedy(3))
    engine.add_request("b", PROMPT, greedy(3), arrival_time=0.0)
    done: dict[str, RequestOutput] = drain(engine)
    a, b = done["a"].metrics, done["b"].metrics
    assert a.queue_s is not None and a.ttft_s is not None and a.e2e_s is not None
    assert a.queue_s < 0.02 <= a.ttft_s < a.e2e_s  # waiting ends when computing begins
    assert len(a.itl_s) == 2 and min(a.itl_s) >= 0.02
    assert b.arrival_time == 0.0
    assert b.cached_tokens == 4 and a.cached_tokens == 0


def test_times_add_up() -> None:
    engine = toy_engine()
    start = time.perf_counter()
    run_one(engine, PROMPT, greedy(20))
    spent = time.perf_counter() - start
    times = engine.ledger.total
    assert times.steps == 20 == engine.stats()["steps"]
    parts = (times.schedule_s, times.batch_s, times.forward_s, times.sample_s, times.output_s)
    assert all(part > 0 for part in parts) and sum(parts) + times.detokenize_s < spent

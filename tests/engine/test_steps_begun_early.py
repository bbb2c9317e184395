"""Steps that are begun before those before them have ended: whoever comes, goes or gives way, each
request's tokens are those that it has in an engine that takes one step after another.

The decoder is a CPU's, over its own kernels; around it is all that a GPU's steps have: padding,
tokens that only the device knows, rows of sequences that have ended meanwhile.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import SamplingParams
from penstock.config import CompilationConfig, EngineConfig
from penstock.engine import Engine, PoolingParams, RequestOutput
from penstock.runtime import Runner
from penstock.runtime.device import Device
from penstock.runtime.graphs import GraphForward, StepLimits
from penstock.step import KV, Step

from .test_soak import MAX_LEN, VOCAB, tiny_runtime
from .toy import check

COUNT = 120
CUTS = ("top_p", "top_k", "min_p", "typical_p", "xtc_probability")
LIMITS = StepLimits(sequences=12, tokens=40, width=MAX_LEN // 32)


class Unpadded(nn.Module):
    """A decoder for kernels that take no queries of nobody's: what stands for them says nothing."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, step: Step, kv: KV) -> Tensor:
        count = step.num_tokens
        if int(step.query_start[-1]) == count:
            logits: Tensor = self.decoder(step, kv)
            return logits
        real = int(step.query_start[-1])
        assert (step.slots[real:] == -1).all()
        cut = Step(
            *(array[:real] for array in (step.tokens, step.positions, step.slots)),
            step.query_start[: real + 1],
            *(array[:real] for array in (step.context_len, step.block_table, step.sample_at)),
        )
        logits = torch.full((count, VOCAB), torch.nan)
        logits[:real] = self.decoder(cut, kv)
        return logits


def engine(graphs: bool = True, num_blocks: int = 40, **options: Any) -> Engine:
    found = tiny_runtime()
    kv = found.layout.allocate(num_blocks)
    runtime = replace(found, num_blocks=num_blocks, runner=Runner(found.model.model, kv))
    if graphs:
        device = Device(torch.device("cpu"), by_triton=False)
        decoder = Unpadded(runtime.model.model)
        forward = GraphForward(decoder, kv, device, LIMITS, CompilationConfig())
        runtime = replace(runtime, runner=Runner(forward, kv))
    chosen = {"max_num_seqs": LIMITS.sequences, "max_num_batched_tokens": LIMITS.tokens}
    return Engine(EngineConfig.of(**chosen | options), runtime)


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Half begin alike; most look at nothing before, so that steps can be begun early."""
    shared = [7 + i % 40 for i in range(rng.choice([0, 0, 0, 33, 64, 90]))]
    prompt = shared + [rng.randrange(2, 62) for _ in range(rng.randint(1, 20))]
    options: dict[str, Any] = {
        "max_tokens": rng.choice([2, 3, 8, 20, 40, 70]),
        "temperature": rng.choice([0.0, 0.8, 1.5]),
        "seed": rng.randrange(1000),
    }
    for name, values, share in (
        ("top_p", [0.9], 0.3), ("top_k", [5], 0.3), ("min_p", [0.05], 0.1),
        ("xtc_probability", [0.5], 0.1), ("typical_p", [0.8], 0.1),
        ("repetition_penalty", [1.2, 0.8], 0.2), ("presence_penalty", [0.7], 0.1),
        ("frequency_penalty", [0.4, -0.3], 0.2), ("logprobs", [0, 3], 0.2),
        ("prompt_logprobs", [1], 0.05), ("stop", ["ab", ["z", "qq"]], 0.2),
        ("stop_token_ids", [[5]], 0.3), ("min_tokens", [1, 2], 0.2), ("ignore_eos", [True], 0.3),
        ("logit_bias", [{3: 2.0}], 0.1), ("bad_words", [["ab"]], 0.01),
    ):  # fmt: skip
        if rng.random() < share and (options["temperature"] or name != "xtc_probability"):
            options[name] = rng.choice(values)
    if options["temperature"]:
        options["n"] = rng.choice([1, 1, 1, 2, 4])
        if rng.random() < 0.01:
            options = {k: v for k, v in options.items() if k not in CUTS} | {"mirostat": 2}
    return prompt, SamplingParams(**options)


def seen(output: RequestOutput) -> list[Any]:
    return [
        (
            sample.token_ids,
            sample.text,
            sample.finish_reason,
            [{t: (p.logprob, p.rank) for t, p in at.items()} for at in sample.logprobs or []],
        )
        for sample in output.outputs
    ]


def run(
    engine: Engine, seed: int, *, aborts: float = 0.0, pools: float = 0.0
) -> dict[str, list[Any]]:
    """The same requests, whatever `seed` says of when they come and go."""
    requests, rng = random.Random(7), random.Random(seed)
    added, busy, found = 0, True, {}
    while added < COUNT or engine.has_unfinished:
        while added < COUNT and len(engine.requests) < 20 and rng.random() < (0.02, 0.5)[busy]:
            engine.add_request(str(added), *random_request(requests), stream=rng.random() < 0.5)
            added += 1
        busy ^= rng.random() < 0.1
        if rng.random() < pools:
            tokens = [rng.randrange(2, 62) for _ in range(rng.randint(1, 60))]
            engine.add_pooling_request(f"p{rng.random()}", tokens, PoolingParams())
        if engine.requests and rng.random() < aborts:
            engine.abort(rng.choice(list(engine.requests)))
        for output in engine.step():
            if output.finished:
                assert output.error is None
                if output.request_id.isdecimal():
                    found[output.request_id] = seen(output)
        if rng.random() < 0.1:
            check(engine)
    check(engine)
    assert engine.stats()["used_blocks"] == 0
    assert not engine.requests and not engine.scheduler.has_work
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    found = run(engine(graphs=False), 0)
    assert len(found) == COUNT
    return found


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "recomputed": {"preemption_mode": "recompute", "num_blocks": 8},
    "swapped": {"preemption_mode": "swap", "swap_space": 0.01, "num_blocks": 8},
    "no prefixes": {"enable_prefix_caching": False},
    "shortest first": {"policy": "sjf"},
    "small": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same(expected: dict[str, list[Any]], way: str) -> None:
    early = engine(**WAYS[way])
    assert run(early, 1 + list(WAYS).index(way), pools=0.02) == expected
    tight = "num_blocks" in WAYS[way]
    assert early.computing.overlapped > (2 if tight else 20)
    assert not tight or early.stats()["preemptions"] > 0


def test_those_that_are_left_by_others(expected: dict[str, list[Any]]) -> None:
    early = engine()
    found = run(early, 9, aborts=0.1)
    ended = [name for name, samples in found.items() if all(s[2] != "abort" for s in samples)]
    assert 30 < len(ended) < COUNT
    for name in ended:
        assert found[name] == expected[name]
    assert early.computing.overlapped > 20


def test_somebody_who_waits_for_blocks_stops_nobody() -> None:
    """Steps are begun early although the queue isn't empty, and who waits starts in the end."""
    early = engine(num_blocks=4, preemption_mode="recompute")  # of 32 tokens
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for name in ("first", "second"):
        early.add_request(name, [2 + (i + len(name)) % 60 for i in range(66)], params)
    ended: dict[str, int] = {}
    steps = 0
    while early.has_unfinished:
        outputs = early.step()
        steps += 1
        if steps == 20:
            assert early.scheduler.num_running == early.scheduler.num_waiting == 1
            assert early.computing.overlapped > 10
        ended |= {output.request_id: steps for output in outputs if output.finished}
    assert list(ended) == ["first", "second"]
    assert early.stats()["preemptions"] == 0


def plain(max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_an_embedding_in_chunks_does_not_stand_still() -> None:
    """Between its chunks the others' steps only decode."""
    steps = {}
    for early in (False, True):
        one = engine(async_scheduling=early)
        one.add_request("text", [5, 6, 7], plain())
        for _ in range(3):
            one.step()
        one.add_pooling_request("vector", [2 + i % 50 for i in range(90)], PoolingParams())
        while "vector" in one.requests:
            one.step()
            steps[early] = steps.get(early, 0) + 1
        assert "text" in one.requests
    assert steps[True] <= steps[False] + 1


def test_after_a_step_that_failed_everybody_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is computed again alone, and the steps begun ahead of these have one sequence each."""
    one = engine()
    for name in "abc":
        one.add_request(name, [ord(name) - 90, 6, 7], plain())
    for _ in range(4):
        one.step()
    original, left = one.batcher.build, [2]

    def fails(parts: Any) -> Any:
        if left[0] and len(parts) == 3:
            left[0] -= 1
            raise RuntimeError("once")
        return original(parts)

    one.computing.forget()
    monkeypatch.setattr(one.batcher, "build", fails)
    for _ in range(20):
        one.step()
    assert left[0] < 2
    lengths = {r.sequences[0].num_output for r in one.requests.values()}
    assert min(lengths) >= 20


def test_a_follower_that_cannot_be_begun_costs_nobody_a_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    one.add_request("a", [5, 6, 7], plain(20))
    want = run_alone(one)

    def fails(members: Any, rows: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(one.batcher, "following", fails)
    one.add_request("a", [5, 6, 7], plain(20))
    assert run_alone(one) == want
    assert "couldn't be begun ahead" in caplog.text


def run_alone(one: Engine) -> list[int]:
    """The only request's tokens."""
    while True:
        for output in one.step():
            if output.finished:
                assert output.error is None
                return list(output.outputs[0].token_ids)

"""Pooling requests on a toy: what they give, beside whom they run, and what they refuse.

The toy's hidden state of a token is a hash of all tokens up to it: `logits_of`, 16 wide.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock import AsyncLLM, SamplingParams
from penstock.engine import Engine, Pin, PoolingParams, RequestOptions
from penstock.engine.pooling import PoolingRequest, PoolingRequestOutput
from penstock.errors import ConfigError, InvalidPromptError, RequestError
from penstock.roofline import StepRecord

from .letters import tokenizer
from .test_llm import toy_llm
from .toy import (
    HIDDEN,
    IS_NAN,
    RAISES,
    Toy,
    check,
    drain,
    logits_of,
    reference,
    toy_engine,
    toy_runtime,
)

KINDS = ("last", "mean", "cls")


def expect(prompt: Sequence[int], params: PoolingParams) -> list[float]:
    """The embedding, in exact arithmetic where the order of additions could matter."""
    rows = [logits_of(prompt[: i + 1], HIDDEN).tolist() for i in range(len(prompt))]
    pooled = {
        "last": rows[-1],
        "cls": rows[0],
        # 24 bits each, of one magnitude: float64 adds a few hundred of them without rounding
        "mean": [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)],
    }[params.pooling_type][: params.dimensions]
    if params.normalize:
        length = math.sqrt(math.fsum(x * x for x in pooled))
        pooled = [x / length for x in pooled]
    return [float(np.float32(x)) for x in pooled]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def embed(engine: Engine, prompts: dict[str, list[int]], params: PoolingParams) -> dict[str, Any]:
    for name, tokens in prompts.items():
        engine.add_pooling_request(name, tokens, params)
    return dict(drain(engine))


# ── what they give ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [8, 13, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_many_at_once(kind: Any, budget: int, caching: bool) -> None:
    engine = toy_engine(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    params = PoolingParams(kind)
    prompts = {str(n): prompt(n, n % 3) for n in (1, 3, 4, 5, 7, 8, 9, 20, 33, 64)}
    for _ in range(2):  # the second time most is cached
        done = embed(engine, prompts, params)
        for name, tokens in prompts.items():
            output = done[name]
            assert isinstance(output, PoolingRequestOutput)
            assert output.embedding == expect(tokens, params)
            assert (output.outputs, output.finish_reason) == ([], "stop")
            metrics = output.metrics
            assert metrics.cached_tokens + metrics.computed_tokens == len(tokens)
    hit = sum(output.metrics.cached_tokens for output in done.values())
    assert hit == (sum((n - 1) // 4 * 4 for n in map(int, prompts)) if reads(kind, caching) else 0)
    assert engine.stats()["used_blocks"] == 0


def reads(kind: str, caching: bool) -> bool:
    """Whether it can begin after what is cached: the others need every row, or the first."""
    return caching and kind == "last"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [None, 1, 7, HIDDEN])
def test_parameters(kind: Any, normalize: bool, dimensions: int | None) -> None:
    params = PoolingParams(kind, normalize, dimensions)
    found = embed(toy_engine(), {"it": prompt(21)}, params)["it"].embedding
    assert found == expect(prompt(21), params)
    assert len(found) == (dimensions or HIDDEN)
    if normalize:
        assert math.isclose(math.fsum(x * x for x in found), 1.0, rel_tol=1e-6)


def test_a_row_of_zeros_has_no_direction() -> None:
    assert PoolingParams().finish(np.zeros(3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_after_giving_way(kind: Any) -> None:
    """A prompt in chunks loses its blocks to one that came before, and begins again."""
    engine = toy_engine(9, 36, max_num_batched_tokens=8, enable_prefix_caching=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=25)
    engine.add_request("first", prompt(7), greedy)
    engine.add_pooling_request("it", prompt(30, 1), PoolingParams(kind))
    done: dict[str, Any] = dict(drain(engine))
    assert done["it"].metrics.preemptions > 0
    assert done["it"].metrics.computed_tokens > 30
    assert done["it"].embedding == expect(prompt(30, 1), PoolingParams(kind))
    want = reference(prompt(7), greedy, max_model_len=36)
    assert done["first"].outputs[0].token_ids == want


def test_beside_requests_that_generate() -> None:
    """Random arrivals, aborts and broken prompts of both kinds, with salts and pins."""
    rng = random.Random(3)
    for seed in range(12):
        blocks = rng.choice([16, 20, 60])
        engine = toy_engine(
            blocks, max_num_batched_tokens=rng.choice([8, 16, 64]), eos=(1,), max_num_seqs=5
        )
        asked: dict[str, tuple[list[int], Any]] = {}
        done: dict[str, Any] = {}
        for i in range(60):
            tokens = prompt(rng.choice([0, 8, 20]), 5) + prompt(
                rng.randint(1, 20), rng.randrange(9)
            )
            tokens += rng.choice([[]] * 12 + [[RAISES], [IS_NAN]])
            options = RequestOptions(
                cache_salt=rng.choice([None, None, "a"]), pins=(Pin(rng.choice([0, 0, 8, 21])),)
            )
            name = f"{seed}-{i}"
            if rng.random() < 0.5:
                pooling = PoolingParams(rng.choice(KINDS), rng.random() < 0.5)
                engine.add_pooling_request(name, tokens, pooling, options=options)
                asked[name] = tokens, pooling
            else:
                drawn = SamplingParams(
                    n=rng.choice([1, 1, 3]), seed=i, max_tokens=rng.choice([1, 9])
                )
                engine.add_request(name, tokens, drawn, options=options)
                asked[name] = tokens, drawn
            if rng.random() < 0.1:
                engine.abort(rng.choice(list(asked)))
            for _ in range(rng.choice([0, 1, 3])):
                done |= {output.request_id: output for output in engine.step()}
                check(engine)
        done |= drain(engine)
        assert done.keys() == asked.keys()
        for name, (tokens, params) in asked.items():
            judge(done[name], tokens, params)
        assert engine.stats()["used_blocks"] == 0
        engine.reset_prefix_cache()
        assert len(engine.pool._free) == blocks


def judge(output: Any, tokens: list[int], params: PoolingParams | SamplingParams) -> None:
    pools = isinstance(params, PoolingParams)
    reason = output.finish_reason if pools else output.outputs[0].finish_reason
    if reason == "abort":
        return
    if RAISES in tokens or (IS_NAN in tokens and getattr(params, "pooling_type", "") != "cls"):
        assert reason == "error" and output.error is not None
    elif isinstance(params, PoolingParams):
        assert output.error is None and output.embedding == expect(tokens, params)
    else:
        for sample in output.outputs:
            want = reference(tokens, params, index=sample.index, eos=(1,))
            assert sample.token_ids == want


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def test_only_the_culprit_fails() -> None:
    engine = toy_engine()
    prompts = {"a": prompt(9), "b": [*prompt(5), RAISES], "c": prompt(6, 1), "d": [3, IS_NAN, 4]}
    done = embed(engine, prompts, PoolingParams("mean"))
    assert isinstance(done["b"].error, RuntimeError) and done["b"].embedding == []
    assert isinstance(done["d"].error, RequestError) and "finite" in str(done["d"].error)
    for name in "ac":
        assert done[name].embedding == expect(prompts[name], PoolingParams("mean"))
    assert engine.stats()["used_blocks"] == 0


def test_abort_frees_everything() -> None:
    engine = toy_engine(max_num_batched_tokens=8)
    for kind in KINDS:
        engine.add_pooling_request(kind, prompt(30), PoolingParams(kind))  # type: ignore[arg-type]
    engine.step()
    engine.step()
    assert engine.stats()["used_blocks"] > 0
    for kind in KINDS:
        engine.abort(kind)
    check(engine)
    assert engine.stats()["used_blocks"] == 0
    outputs: list[Any] = engine.step()
    assert [(o.request_id, o.finish_reason, o.embedding) for o in outputs] == [
        (kind, "abort", []) for kind in KINDS
    ]
    assert not engine.has_unfinished


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"pooling_type": "LAST"}, "'LAST' isn't one of last, mean, cls. Did you mean 'last'"),
    ({"pooling_type": None}, "None isn't one of"),
    ({"normalize": 1}, "normalize must be True or False, not 1"),
    ({"dimensions": 0}, "dimensions must be a positive integer, not 0"),
    ({"dimensions": True}, "not True"),
    ({"dimensions": 2.0}, "not 2.0"),
]


@pytest.mark.parametrize(("given", "words"), WRONG_PARAMS)
def test_wrong_parameters(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        PoolingParams(**given)


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ([], None, InvalidPromptError, "The prompt is empty"),
    (prompt(65), None, InvalidPromptError, "65 tokens, but only 64 fit into max_model_len=64"),
    ([64], None, InvalidPromptError, "Token id 64 is outside the vocabulary of 64"),
    ([1.5], None, InvalidPromptError, "not float64"),
    ([1], PoolingParams(dimensions=17), RequestError, "dimensions=17, but .* have 16"),
    ([1], {"pooling_type": "mean"}, RequestError, "PoolingParams, not dict"),
    ([1], SamplingParams(), RequestError, "PoolingParams, not SamplingParams"),
]


@pytest.mark.parametrize(("tokens", "params", "kind", "words"), WRONG)
def test_wrong_requests(tokens: Any, params: Any, kind: type[Exception], words: str) -> None:
    engine = toy_engine()
    with pytest.raises(kind, match=words):
        engine.add_pooling_request("it", tokens, params)
    assert not engine.has_unfinished and not engine.scheduler.has_work


def test_an_id_in_use() -> None:
    engine = toy_engine()
    engine.add_pooling_request("it", [1])
    with pytest.raises(RequestError, match="'it' is already in use"):
        engine.add_pooling_request("it", [1])
    with pytest.raises(RequestError, match="'it' is already in use"):
        engine.add_request("it", [1], SamplingParams())


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_of_their_own() -> None:
    """One pass for those that generate, one for those that pool, which has no head to pay for."""
    engine = toy_engine()
    records: list[StepRecord] = []
    engine.ledger.watch = records.append
    assert engine.pooler is None  # nothing is made before it is wanted
    engine.add_request("text", prompt(5), SamplingParams(temperature=0.0, max_tokens=3))
    engine.step()
    assert engine.pooler is None
    engine.add_pooling_request("a", prompt(6), PoolingParams("mean"))
    engine.add_pooling_request("b", prompt(7, 1))
    engine.step()
    engine.step()
    sizes = [(list(r.size.queries), list(r.size.contexts), r.size.sampled) for r in records]
    assert sizes == [([5], [5], 1), ([6, 7], [6, 7], 0), ([1], [6], 1), ([1], [7], 1)]
    assert all(seconds >= 0 for record in records for seconds in record.lost.values())
    assert records[2].wait_s == 0  # counted with the first of the step
    toy = engine.runtime.runner._forward
    assert isinstance(toy, Toy) and len(toy.steps) == 3


def test_copies_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy is made of may have been given to a pooling sequence in the same plan."""
    engine, order = toy_engine(), list[str]()
    engine.add_request("text", prompt(6), SamplingParams(n=2, seed=1, max_tokens=4))
    engine.step()
    engine.add_pooling_request("it", prompt(5))
    assert engine.pooler is not None
    for name, holder in (("copy", engine.runtime.runner), ("_run", engine.pooler)):
        call = getattr(holder, name)

        def noted(*given: Any, name: str = name, call: Any = call) -> Any:
            order.append(name)
            return call(*given)

        monkeypatch.setattr(holder, name, noted)
    engine.step()
    assert order == ["copy", "_run"]


def test_nothing_of_a_request_is_left() -> None:
    engine = toy_engine()
    embed(engine, {"a": [1], "b": [2]}, PoolingParams())
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is PoolingRequest]


def test_decoding_goes_on_in_place_beside_them() -> None:
    """The batch of those that decode isn't laid out anew for a pooling pass that doesn't end."""
    engine = toy_engine(max_num_batched_tokens=9)
    engine.add_request("text", prompt(5), SamplingParams(temperature=0.0, max_tokens=9))
    engine.step()
    engine.step()
    batch = engine.batcher._batch
    assert batch is not None
    engine.add_pooling_request("a", prompt(30), PoolingParams("mean"))
    engine.step()
    assert engine.batcher._batch is batch
    drain(engine)


# ── LLM and AsyncLLM ─────────────────────────────────────────────────────────────────────────────


def test_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch)
    ids = tokenizer().encode("hello")
    first, second = llm.embed(["hello", [7, 8, 9]])
    assert (first.prompt, first.prompt_token_ids, first.finished) == ("hello", ids, True)
    assert first.outputs.embedding == expect(ids, PoolingParams())
    assert first.outputs.hidden_size == HIDDEN
    assert second.outputs.embedding == expect([7, 8, 9], PoolingParams())
    assert second.metrics.computed_tokens == 3
    mean = PoolingParams("mean", dimensions=4)
    (only,) = llm.embed("hello", mean)
    assert only.outputs.embedding == expect(ids, mean)
    both = llm.embed([[7], [8]], [PoolingParams(), mean], options=RequestOptions(cache_salt="a"))
    assert [len(output.outputs.embedding) for output in both] == [HIDDEN, 4]
    assert llm.embed([]) == []
    for output in llm.generate(["hello"], SamplingParams(temperature=0.0)):
        assert output.outputs[0].token_ids == reference(
            ids, SamplingParams(temperature=0.0), eos=(1,)
        )
    with pytest.raises(ConfigError, match="1 pooling parameters for 2 prompts"):
        llm.embed(["a", "b"], [PoolingParams()])
    with pytest.raises(ConfigError, match="3 options for 1 prompts"):
        llm.embed("a", options=[RequestOptions()] * 3)
    wrong: Any = {"cache_salt": "a"}
    with pytest.raises(RequestError, match="Options must be RequestOptions, not dict"):
        llm.generate("a", options=wrong)
    with pytest.raises(RequestError, match="aren't finite"):
        llm.embed([[3], [4, IS_NAN]])
    with pytest.raises(RuntimeError, match="the toy broke"):
        llm.embed([[3], [4, RAISES]])
    assert not llm.engine.has_unfinished and llm.stats()["used_blocks"] == 0


def test_async_llm() -> None:
    runtime = toy_runtime(tokenizer=tokenizer())

    async def body() -> None:
        llm = AsyncLLM(runtime=runtime, max_num_batched_tokens=64)
        try:
            prompts = [prompt(n, n) for n in range(1, 30)]
            outputs = await asyncio.gather(*(llm.embed(tokens) for tokens in prompts))
            for tokens, output in zip(prompts, outputs, strict=True):
                assert output.outputs.embedding == expect(tokens, PoolingParams())
            with pytest.raises(InvalidPromptError, match="only 64 fit"):
                await llm.embed([3] * 65)
            with pytest.raises(RequestError, match="aren't finite"):
                await llm.embed([3, IS_NAN])
            await dropped(llm)
            assert llm.stats()["used_blocks"] == 0 and not llm._streams
        finally:
            llm.shutdown()

    asyncio.run(asyncio.wait_for(body(), 60))


async def dropped(llm: AsyncLLM) -> None:
    """A task that is cancelled and a request that is aborted, while the engine stands still."""
    step, go = llm.engine.step, asyncio.Event()

    def stand() -> list[Any]:
        return step() if go.is_set() else []

    llm.engine.step = stand  # type: ignore[method-assign]
    task = asyncio.create_task(llm.embed([3, 4], request_id="cancelled"))
    other = asyncio.create_task(llm.embed([3, 4], request_id="aborted"))
    while len(llm.engine.requests) < 2:
        await asyncio.sleep(0.001)
    task.cancel()
    await llm.abort("aborted")
    while llm.engine.requests:
        await asyncio.sleep(0.001)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RequestError, match="'aborted' was aborted"):
        await other

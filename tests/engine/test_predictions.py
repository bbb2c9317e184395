"""Outputs that callers expect: they decide how fast it goes, and nothing else."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
from torch import Tensor

from penstock import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from penstock.config import EngineConfig
from penstock.engine import Engine, PoolingParams, RequestOptions
from penstock.errors import RequestError
from penstock.speculate.control import PLAIN_STEPS
from penstock.step import KV, Step

from .test_speculation import LITTLE_ROOM, random_params
from .toy import Toy, check, drain, reference, toy_engine, toy_runtime

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
RIGHT = tuple(reference(PROMPT, GREEDY))


def guessing(method: str = "ngram", **more: Any) -> Engine:
    options = {key: more.pop(key) for key in ("adaptive", "disable_by_batch_size") if key in more}
    return toy_engine(speculative_config={"method": method, **options}, **more)


def edited(rng: random.Random, tokens: list[int]) -> tuple[int, ...]:
    """What is expected: the output with parts replaced, left out and put in; or anything."""
    expected = list(tokens)
    for _ in range(rng.choice([0, 1, 2, 8])):
        at = rng.randrange(len(expected) + 1)
        expected[at : at + rng.randrange(4)] = [rng.randrange(60) for _ in range(rng.randrange(4))]
    return tuple(expected or [rng.randrange(60)])


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("options", LITTLE_ROOM, ids=str)
def test_what_comes_is_what_would_have_come(
    options: dict[str, Any], adaptive: bool, method: str
) -> None:
    rng = random.Random(f"{options} {adaptive} {method}")
    engine = guessing(method, adaptive=adaptive, **options)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    done: dict[str, Any] = {}
    while len(asked) < 20 or engine.has_unfinished:
        if len(asked) < 20 and rng.random() < 0.4:
            prompt = [rng.randrange(2, 60) for _ in range(rng.randint(1, 20))]
            name, params = str(len(asked)), random_params(rng)
            asked[name] = prompt, params
            expected = edited(rng, reference(prompt, params)) if rng.random() < 0.8 else None
            engine.add_request(name, prompt, params, options=RequestOptions(prediction=expected))
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check(engine)
    for name, (prompt, params) in asked.items():
        want = [reference(prompt, params, index=i) for i in range(params.n)]
        assert [sample.token_ids for sample in done[name].outputs] == want, (name, params)
    assert engine.speculation is not None
    assert adaptive or engine.speculation.counts.accepted_tokens > 50
    assert engine.pool.num_used == 0


def test_a_right_one_needs_few_steps() -> None:
    engine = guessing(adaptive=False)
    engine.add_request("it", PROMPT, GREEDY, options=RequestOptions(prediction=RIGHT))
    steps = 0
    while engine.has_unfinished:
        (*_, output) = engine.step() or [None]
        steps += 1
    assert output is not None and tuple(output.outputs[0].token_ids) == RIGHT
    drafts = output.metrics.drafts
    assert drafts == output.metrics.predicted
    assert steps == 4 and drafts.accepted_tokens == drafts.draft_tokens == 40 - 4


def off(engine: Engine, batch: int) -> Any:
    """Plain steps are known, and drafts are off and at rest: others have been found not to pay."""
    for name in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        engine.add_request(f"before {name}", [9 + name], params)
    drain(engine)
    speculation = engine.speculation
    assert speculation is not None
    control = speculation.controller
    control._verdict.is_on, control._budget_s, control._looks_s = False, -1.0, -1.0
    speculation._rest = 60
    return speculation


def test_one_doesnt_wait_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = guessing()
    speculation = off(engine, batch=2)
    engine.add_request("other", [*RIGHT, *PROMPT], GREEDY)
    engine.add_request("it", PROMPT, GREEDY, options=RequestOptions(prediction=RIGHT))
    looked = []
    real = speculation.proposer.propose
    monkeypatch.setattr(
        speculation.proposer, "propose", lambda wishes: looked.append(wishes) or real(wishes)
    )
    for _ in range(4):
        engine.step()
    assert looked and all(wish.expected for wish in looked[0])


def test_no_draft_before_plain_steps_are_known() -> None:
    """Or none would ever be seen, where a draft can always be made."""
    engine = guessing()
    engine.add_request("it", PROMPT, GREEDY, options=RequestOptions(prediction=RIGHT))
    drafted = []
    for _ in range(1 + PLAIN_STEPS):
        engine.step()
        assert engine.speculation is not None
        drafted.append(engine.speculation.counts.drafts)
    assert drafted == [0] * (1 + PLAIN_STEPS)


def test_a_rest_is_paid_for_once() -> None:
    """Whoever breaks into it doesn't have what its steps save counted again."""
    engine = guessing()
    speculation = off(engine, batch=1)
    engine.add_request("it", PROMPT, GREEDY, options=RequestOptions(prediction=RIGHT))
    rests = []
    while engine.has_unfinished:
        engine.step()
        rests.append(speculation._rest)
    assert rests == list(range(59, 59 - len(rests), -1)) and speculation.counts.drafts


def test_one_that_misleads_is_looked_at_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens stand in it again and again, and what follows there is wrong; forwards take long
    by their rows, so that no guess pays that is mostly wrong.
    """
    params = SamplingParams(temperature=0.0, max_tokens=300)
    toy = Toy()
    took: list[int] = []

    def slow(step: Step, kv: KV) -> Tensor:
        took.append(step.num_tokens)
        end = time.perf_counter() + 1e-3 * (1 + 0.5 * step.num_tokens)
        logits = toy(step, kv)
        while time.perf_counter() < end:
            pass
        return logits

    plain = reference(PROMPT, params, max_model_len=400)
    wrong = [x for at in range(len(plain) - 1) for x in (*plain[at : at + 2], 61)]
    runtime = toy_runtime(512, 2000, forward=slow)
    engine = Engine(EngineConfig.of(speculative_config={"method": "ngram"}), runtime)
    assert engine.speculation is not None
    looks, propose = list[int](), engine.speculation.proposer.propose
    monkeypatch.setattr(
        engine.speculation.proposer,
        "propose",
        lambda wishes: looks.append(len(wishes)) or propose(wishes),
    )
    engine.add_request("it", PROMPT, params, options=RequestOptions(prediction=tuple(wrong)))
    output = drain(engine)["it"]
    assert output.outputs[0].token_ids == plain
    assert sum(took[1:]) < 1.15 * len(plain)  # 1.7 where each step verifies one
    assert 3 < len(looks) < 60  # of 300 steps


def test_no_drafts_in_large_batches_whatever_is_expected() -> None:
    engine = guessing(adaptive=False, disable_by_batch_size=1)
    for name in "ab":
        engine.add_request(name, PROMPT, GREEDY, options=RequestOptions(prediction=RIGHT))
    assert all(not output.metrics.drafts.drafts for output in drain(engine).values())


OTHERS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, GREEDY, "no effect: there are no drafts here"),
    ({"method": "ngram"}, BeamSearchParams(beam_width=2, max_tokens=4), "a beam search has no"),
    ({"method": "ngram"}, SamplingParams(mirostat=2), "with mirostat what comes depends"),
    (
        {"method": "suffix"},
        SamplingParams(logits_processors=[lambda ids, row: row]),
        "with logits_processors",
    ),
    ({"method": "ngram"}, SamplingParams(guidance_scale=2.0), "guidance_scale samples"),
]


@pytest.mark.parametrize(("config", "params", "words"), OTHERS)
def test_where_it_would_have_no_effect(config: dict[str, Any], params: Any, words: str) -> None:
    engine = toy_engine(speculative_config=config or None)
    with pytest.raises(RequestError, match=words):
        engine.add_request("it", PROMPT, params, options=RequestOptions(prediction=(1, 2)))
    assert not engine.has_unfinished
    options = RequestOptions(prediction=(1, 2))
    with pytest.raises(RequestError, match="no effect"):
        engine.add_pooling_request("it", PROMPT, PoolingParams(), options=options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "prediction is empty"),
        ((), "prediction is empty"),
        ([1, 2], "a text or a tuple of token ids, not list"),
        (5, "not int"),
        ((1, 64), "prediction is refused: Token id 64 is outside"),
        ((1, -1), "prediction is refused: Token id -1 is outside"),
        (("a",), "prediction holds 'a', which isn't a token id"),
        ((1, 2.0), "prediction holds 2.0, which isn't"),
        ("text", "needs a tokenizer"),
    ],
)
def test_what_cant_be_expected(given: Any, words: str) -> None:
    engine = guessing()
    with pytest.raises(RequestError, match=words):
        engine.add_request("it", PROMPT, GREEDY, options=RequestOptions(prediction=given))
    assert not engine.has_unfinished


def test_more_than_ever_comes_is_cut() -> None:
    engine = guessing(adaptive=False)
    many = RequestOptions(prediction=RIGHT + (1,) * 1_000_000)
    engine.add_request("it", PROMPT, GREEDY, options=many)
    (request,) = engine.requests.values()
    assert request.expected is not None
    assert len(request.expected.tokens) == engine.max_model_len
    assert tuple(drain(engine)["it"].outputs[0].token_ids) == RIGHT


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config={"method": "ngram", "adaptive": False})


def test_a_text(llm: LLM) -> None:
    """The embedded model's; edited, most of it still comes true."""
    params = SamplingParams(temperature=0.0, max_tokens=60)
    (plain,) = LLM().generate("One day", params)
    text = plain.outputs[0].text
    expected = [text, text.replace(" the ", " a "), "Something else. " * 50]
    outputs = llm.generate(
        ["One day"] * 3, params, options=[RequestOptions(prediction=one) for one in expected]
    )
    assert {tuple(one.outputs[0].token_ids) for one in outputs} == {
        tuple(plain.outputs[0].token_ids)
    }
    whole, much, nothing = (one.metrics.drafts.accepted_tokens for one in outputs)
    assert whole > 50 and whole > much > 20 and much > nothing
    with pytest.raises(RequestError, match="prediction has 1,000,000 characters"):
        llm.generate("One day", params, options=RequestOptions(prediction="a" * 1_000_000))


def test_a_text_is_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(speculative_config={"method": "ngram", "adaptive": False})
    intake, threads = llm.engine.intake, list[threading.Thread]()
    real = intake.expecting

    def noted(options: RequestOptions) -> RequestOptions:
        if isinstance(options.prediction, str):
            threads.append(threading.current_thread())
        return real(options)

    async def answer(options: Any) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=30)
        async for output in llm.generate("One day", params, options=options):
            last = output
        counts.append(last.metrics.drafts.accepted_tokens)
        return last.outputs[0].text

    async def both() -> None:
        text = await answer(None)
        assert await answer(RequestOptions(prediction=text)) == text
        with pytest.raises(RequestError, match="Options must be RequestOptions"):
            await answer({"prediction": text})

    counts: list[int] = []
    monkeypatch.setattr(intake, "expecting", noted)
    try:
        asyncio.run(both())
    finally:
        llm.shutdown()
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    assert counts[1] > 20 > counts[0]

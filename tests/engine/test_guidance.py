"""Guided samples: what the formula gives, whatever else runs, and as transformers computes it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.engine import Engine, RequestOptions
from penstock.engine.guidance import guided
from penstock.errors import InvalidSamplingError, RequestError
from penstock.roofline import StepRecord
from penstock.sampling import Sampler, SequenceSampling
from tests.engine.toy import IS_NAN, VOCAB, check, drain, logits_of, run_one, toy_engine
from tests.models.tiny import make_tiny


def reference(
    prompt: Sequence[int], negative: Sequence[int], params: SamplingParams, index: int = 0
) -> list[int]:
    """One sample's tokens, from the formula and the sampler alone."""
    assert params.seed is not None and params.max_tokens is not None
    state = SequenceSampling(params, prompt, VOCAB, params.seed, frozenset(), index)
    sampler, output = Sampler(VOCAB), list[int]()
    for _ in range(params.max_tokens):
        own, other = (
            torch.from_numpy(logits_of([*start, *output])).log_softmax(-1)
            for start in (prompt, negative)
        )
        logits = other + params.guidance_scale * (own - other)
        token = sampler(logits[None], [state]).token_ids[0]
        state.append(token)
        output.append(token)
    return output


def params(scale: float = 1.8, **more: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": 12, "seed": 5, "negative_prompt": [4, 5, 6, 7, 8]}
    return SamplingParams(guidance_scale=scale, **(given | more))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 7.5])
def test_the_formula(scale: float) -> None:
    prompt, engine = [1, 2, 3], toy_engine()
    found = run_one(engine, prompt, params(scale)).outputs[0].token_ids
    assert found == reference(prompt, [4, 5, 6, 7, 8], params(scale))
    plain = run_one(engine, prompt, SamplingParams(temperature=0.0, max_tokens=12))
    assert found != plain.outputs[0].token_ids
    assert engine.stats()["used_blocks"] == 0


def test_scale_1_is_plain_decoding() -> None:
    engine = toy_engine()
    plain = SamplingParams(seed=3, max_tokens=20, guidance_scale=1.0)
    engine.add_request("it", [1, 2, 3], plain)
    engine.step()
    assert engine.stats()["running"] == 1  # there is no second sequence
    assert (
        drain(engine)["it"].outputs[0].token_ids
        == run_one(toy_engine(), [1, 2, 3], SamplingParams(seed=3, max_tokens=20))
        .outputs[0]
        .token_ids
    )


def test_without_a_negative_prompt_the_last_token_stands_alone() -> None:
    given = params(negative_prompt=None)
    assert run_one(toy_engine(), [1, 2, 3], given).outputs[0].token_ids == reference(
        [1, 2, 3], [3], given
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_many_that_crowd_each_other_out(n: int, mode: str) -> None:
    """Prompts of all lengths, few blocks and tokens: all end, and nobody changes anybody's."""
    rng = random.Random(n)
    swap: dict[str, Any] = {"swap_space": 1e-4} if mode == "swap" else {}
    engine = toy_engine(
        21 * n,
        40,
        max_num_batched_tokens=16 * n * n,
        max_num_seqs=16 * n,
        preemption_mode=mode,
        **swap,
    )
    wanted = {}
    for i in range(30):
        prompt = [rng.randrange(60) for _ in range(rng.randrange(1, 20))]
        if i % 3 == 0:
            given = SamplingParams(n=n, seed=i, max_tokens=rng.randrange(1, 16))
            negative: list[int] = []
        else:  # some share their start with the prompt, some hold all of it
            start = prompt[: rng.randrange(len(prompt) + 1)]
            negative = start + [rng.randrange(60) for _ in range(rng.randrange(1, 12))]
            given = params(
                n=n, seed=i, temperature=1.0, max_tokens=rng.randrange(1, 12),
                negative_prompt=negative,
            )  # fmt: skip
        engine.add_request(str(i), prompt, given)
        wanted[str(i)] = (prompt, negative, given)
    done = drain(engine)
    for name, (prompt, negative, given) in wanted.items():
        for k, sample in enumerate(done[name].outputs):
            if negative:
                assert sample.token_ids == reference(prompt, negative, given, k)
            assert sample.finish_reason == "length"
    assert engine.stats()["preemptions"] > 0
    assert engine.stats()["used_blocks"] == 0


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_a_long_negative_prompt_ends_a_sample_where_the_context_does(
    max_tokens: int | None,
) -> None:
    engine = toy_engine(64, 40)
    given = params(negative_prompt=[*range(31)], max_tokens=max_tokens)
    engine.add_request("it", [1, 2, 3], given)
    engine.add_request("other", [1, 2], SamplingParams(temperature=0.0, max_tokens=20))
    done = drain(engine)
    (sample,) = done["it"].outputs
    assert (len(sample.token_ids), sample.finish_reason) == (9, "length")
    assert len(done["other"].outputs[0].token_ids) == 20
    alone = run_one(toy_engine(), [1, 2, 3], params(negative_prompt=[*range(31)], max_tokens=9))
    assert sample.token_ids == alone.outputs[0].token_ids


def test_one_block_may_take_the_place_of_another_in_mid_batch() -> None:
    """Who comes back from swap with its mate finds that both have computed the same block."""
    for seed in range(60):
        rng = random.Random(seed)
        engine = toy_engine(
            16, 40, max_num_seqs=10, preemption_mode="swap", swap_space=1e-4,
            enable_prefix_caching=True,
        )  # fmt: skip
        wanted = {}
        for i in range(6):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
            given = params(
                seed=i, temperature=1.0, max_tokens=rng.randrange(2, 14),
                negative_prompt=prompt[: rng.randrange(1, 9)],
            )  # fmt: skip
            engine.add_request(str(i), prompt, given)
            wanted[str(i)] = (prompt, given)
        done = drain(engine)
        for name, (prompt, given) in wanted.items():
            assert isinstance(given.negative_prompt, tuple)
            want = reference(prompt, given.negative_prompt, given)
            assert done[name].outputs[0].token_ids == want, seed


def test_tokens_that_a_model_lacks_stay_impossible() -> None:
    lacking = torch.tensor([[0.5, -torch.inf, 1.0], [0.1, -torch.inf, 2.0]])
    engine = toy_engine()
    engine.add_request("it", [1, 2, 3], params(2.0))
    own = engine.requests["it"].sequences[0]
    assert own.shadow is not None
    found = guided([own, own.shadow], [0], lacking)
    assert found[0, 1] == -torch.inf
    assert found.isfinite().sum() == 2


def test_forced_tokens_without_chunks_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of forced tokens that is longer than a step's budget mustn't wait for room for all."""
    llm = LLM(max_model_len=96, max_num_batched_tokens=96, enable_chunked_prefill=False)
    words = "the cat sat on the mat and the dog ran to the big red house by the sea "
    form = {"grammar": f'start: /[ab]/ "{words * 2}" /[a-z]/'}
    given = SamplingParams(
        n=4, seed=1, max_tokens=60, guidance_scale=1.5, negative_prompt="The dog",
        structured_outputs=form,
    )  # fmt: skip
    for i in range(3):
        llm.engine.add_request(str(i), llm.get_tokenizer().encode("Once"), given)
    steps = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        steps += 1
        assert steps < 200


def test_half_started_pairs_make_way_for_each_other() -> None:
    """Each prompt starts, none of their negative prompts fits: the first gets its room."""
    engine = toy_engine(11, 40, max_num_seqs=8)
    for i in range(3):
        given = params(seed=i, negative_prompt=[i, *range(30, 46)], max_tokens=2)
        engine.add_request(str(i), [i, *range(12)], given)
    done = drain(engine)
    for i in range(3):
        given = params(seed=i, negative_prompt=[i, *range(30, 46)], max_tokens=2)
        want = reference([i, *range(12)], [i, *range(30, 46)], given)
        assert done[str(i)].outputs[0].token_ids == want


def test_prompts_that_begin_alike_do_not_wait_for_each_other() -> None:
    block = list(range(8))
    engine = toy_engine(enable_prefix_caching=True)
    cases = itertools.product([block, [*block, 1]], [[*block, 2, 3], [*block, 1, 2]])
    for i, (prompt, negative) in enumerate(cases):
        engine.add_request(str(i), prompt, params(negative_prompt=negative))
    done = drain(engine, 200)
    assert all(output.outputs[0].finish_reason == "length" for output in done.values())
    assert engine.stats()["prefix"]["hits"] > 0


def test_nobody_waits_for_one_that_waits_for_its_mate() -> None:
    """A's shadow waits for a row; C, which A's next block would help, must not keep that row for
    as long as A waits."""
    engine = toy_engine(max_num_seqs=3, policy="sjf", starvation_s=1e9, enable_prefix_caching=True)
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    engine.add_request("long", [9], plain)
    engine.add_request("short", [8], SamplingParams(temperature=0.0, max_tokens=6))
    engine.step()
    prompt = list(range(10, 18))
    engine.add_request("A", prompt, params(negative_prompt=[1, 2, 3], max_tokens=5))
    engine.step()
    assert [s.remaining for s in engine.scheduler.running] == [1, 1, 1]  # A is held back
    engine.add_request("C", [*prompt, 40], SamplingParams(temperature=0.0, max_tokens=5))
    done: list[str] = []
    while engine.has_unfinished:
        done += [output.request_id for output in engine.step() if output.finished]
        check(engine)
    assert done == ["short", "C", "A", "long"]


def test_a_shadow_that_gives_way_is_its_request_that_does() -> None:
    engine = toy_engine(12, 40, max_num_seqs=6, enable_prefix_caching=False)
    for i in range(3):
        given = params(seed=i, negative_prompt=[i, *range(30, 34)], max_tokens=12)
        engine.add_request(str(i), [i, *range(4)], given)
    done = drain(engine)
    each = [output.metrics.preemptions for output in done.values()]
    assert sum(each) == engine.stats()["preemptions"] > 0


def test_the_steps_of_a_shadow_are_those_of_its_request() -> None:
    """Of five chunks of a negative prompt, the request itself is in the first."""
    engine = toy_engine(max_num_batched_tokens=8)
    records: list[StepRecord] = []
    engine.ledger.watch = records.append
    metrics = run_one(engine, [1, 2], params(negative_prompt=list(range(40)), max_tokens=2)).metrics
    assert len(records) > 5
    assert metrics.steps_s == pytest.approx(sum(record.seconds for record in records))


def test_aborted_and_failed() -> None:
    engine = toy_engine()
    engine.add_request("aborted", [1, 2, 3], params())
    engine.add_request("broken", [1, 2], params(negative_prompt=[3, IS_NAN]))
    engine.add_request("other", [1, 2, 3], params())
    done = {output.request_id: output for output in engine.step() if output.finished}
    engine.abort("aborted")
    check(engine)
    done |= drain(engine)
    assert done["aborted"].outputs[0].finish_reason == "abort"
    assert done["broken"].outputs[0].finish_reason == "error"
    assert "NaN" in str(done["broken"].error)
    assert done["other"].outputs[0].token_ids == reference([1, 2, 3], [4, 5, 6, 7, 8], params())
    assert engine.stats()["used_blocks"] == 0


def test_what_could_never_run_is_refused() -> None:
    engine = toy_engine(12, 40, max_num_seqs=3)
    with pytest.raises(RequestError, match=r"2 samples of 2 sequences each .* max_num_seqs is 3"):
        engine.add_request("it", [1], params(n=2, temperature=1.0))
    with pytest.raises(RequestError, match="may need 19 blocks of 4 tokens, but the cache holds"):
        engine.add_request("it", [1, 2], params(max_tokens=30))
    with pytest.raises(RequestError, match="Token id 64 is outside"):
        engine.add_request("it", [1, 2], params(negative_prompt=[64]))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.add_request("it", [1, 2], params(negative_prompt="sad"))
    assert not engine.has_unfinished
    with pytest.raises(InvalidSamplingError, match=r"guidance_scale is 1\.0, which doesn't look"):
        SamplingParams(negative_prompt="sad")
    with pytest.raises(InvalidSamplingError, match="negative_prompt is empty"):
        SamplingParams(guidance_scale=2.0, negative_prompt="")
    with pytest.raises(InvalidSamplingError, match="guidance_scale is -1"):
        SamplingParams(guidance_scale=-1)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    prompts = [[5, 9, 3, 7], [11, 2, 30, 8, 1, 6, 19]]
    negative = [3, 3, 8]
    llm = LLM(tiny.folder, dtype="float32", skip_tokenizer_init=True, max_model_len=64)
    for scale in (0.5, 2.5):
        given = params(scale, negative_prompt=negative, ignore_eos=True, max_tokens=16)
        found = llm.generate(prompts, given)
        for prompt, output in zip(prompts, found, strict=True):
            want = tiny.oracle.generate(
                torch.tensor([prompt]),
                guidance_scale=scale,
                negative_prompt_ids=torch.tensor([negative]),
                do_sample=False,
                max_new_tokens=16,
                min_new_tokens=16,
            )
            assert output.outputs[0].token_ids == want[0, len(prompt) :].tolist()


def guided_pairs(engine: Engine) -> None:
    for i, name in enumerate("ab"):
        params = SamplingParams(
            temperature=0.0, max_tokens=20, guidance_scale=1.5, negative_prompt=[i + 10] * 6,
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
        engine.add_request(name, [i + 1] * 5, params)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_sample_and_its_shadow_have_one_deadline(mode: str, caching: bool) -> None:
    """Two pairs in a cache for little more than one, and somebody urgent who takes their blocks.

    When they ranked apart, two shadows held blocks that both samples lacked, and nobody went on;
    and who came back was sent out in the same step, before its blocks were filled.
    """
    roomy = toy_engine(64, 40)
    guided_pairs(roomy)
    want = {name: list(o.outputs[0].token_ids) for name, o in drain(roomy).items()}
    now = [0.0]
    swap = {"swap_space": 1e-4} if mode == "swap" else {}
    engine = toy_engine(
        16, 40, policy="edf", ttft_slo_s=1.0, preemption_mode=mode, clock=lambda: now[0],
        starvation_s=0.6, enable_prefix_caching=caching, **swap,
    )  # fmt: skip
    guided_pairs(engine)
    found: dict[str, list[int]] = {}
    for steps in range(120):
        now[0] += 0.005
        if steps == 20:
            urgent = SamplingParams(
                temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False
            )
            options = RequestOptions(ttft_slo_s=0.01)
            engine.add_request("c", [50] * 34, urgent, options=options)
        for output in engine.step():
            assert output.error is None
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    assert set(found) == {"a", "b", "c"}
    assert {name: found[name] for name in "ab"} == want

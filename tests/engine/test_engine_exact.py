"""The embedded model: a sequence's tokens and text are its own, whatever runs beside it.

Float32, so that it holds with the reference kernels too; `test_engine_bits` has the logits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock import LLM, RequestOutput, SamplingParams, ops

COUNT, LENGTH = 17, 50


def greedy(max_tokens: int = LENGTH, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **kwargs)


def prompts(count: int = COUNT, seed: int = 0) -> list[list[int]]:
    """Ends before, at and after the borders of blocks; some begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 512) for _ in range(70)]
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 100, 129]
    return [
        (shared if i % 3 == 0 else [])[: rng.choice([33, 64, 70])]
        + [rng.randrange(3, 512) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def seen(output: RequestOutput) -> list[Any]:
    """What must be equal: with the native kernels, logprobs to the last bit."""
    exact = ops.has_native("linear")
    return [
        (
            sample.index,
            sample.token_ids,
            sample.text,
            sample.finish_reason,
            [{t: (p.logprob, p.rank) for t, p in at.items()} for at in sample.logprobs or []]
            if exact
            else None,
        )
        for sample in output.outputs
    ]


def run(llm: LLM, items: list[list[int]], params: SamplingParams) -> list[Any]:
    found = [seen(output) for output in llm.generate(items, params)]
    assert llm.stats()["used_blocks"] == 0
    return found


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each prompt by itself, whole, nothing cached."""
    llm = LLM(max_num_seqs=1, enable_prefix_caching=False, dtype="float32")
    return [run(llm, [prompt], greedy(logprobs=3))[0] for prompt in prompts()]


def test_in_a_batch_and_with_a_prefix_hit(alone: list[Any]) -> None:
    llm = LLM(max_num_seqs=COUNT, dtype="float32")
    assert run(llm, prompts(), greedy(logprobs=3)) == alone
    before = llm.stats()["prefix_hit_rate"]
    assert run(llm, prompts(), greedy(logprobs=3)) == alone
    assert llm.stats()["prefix_hit_rate"] > before


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(alone: list[Any], chunk: int) -> None:
    llm = LLM(max_num_seqs=min(chunk, COUNT), max_num_batched_tokens=chunk, dtype="float32")
    chosen = slice(0, 5) if chunk == 1 else slice(None)  # one token a step takes its time
    assert run(llm, prompts()[chosen], greedy(logprobs=3)) == alone[chosen]


def test_without_chunks(alone: list[Any]) -> None:
    llm = LLM(
        enable_chunked_prefill=False, max_num_batched_tokens=512, max_model_len=512, dtype="float32"
    )
    assert run(llm, prompts(), greedy(logprobs=3)) == alone


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_giving_way(alone: list[Any], caching: bool, mode: str) -> None:
    llm = LLM(
        max_num_seqs=COUNT,
        max_model_len=256,
        num_blocks=10,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        dtype="float32",
    )
    assert run(llm, prompts(), greedy(logprobs=3)) == alone
    stats = llm.stats()
    assert stats[f"preemptions_{mode}"] == stats["preemptions"] > 0
    assert stats["swapped_blocks"] == 0


def test_samples_share_their_prompt_and_stay_themselves() -> None:
    params = SamplingParams(
        n=5, temperature=0.9, seed=11, max_tokens=20, logprobs=2, ignore_eos=True
    )
    prompt = prompts()[8]
    wide = run(LLM(dtype="float32"), [prompt], params)
    tight = LLM(max_num_seqs=5, max_model_len=160, num_blocks=7, dtype="float32")
    assert run(tight, [prompt], params) == wide
    assert tight.stats()["preemptions"] > 0
    assert len({tuple(sample[1]) for sample in wide[0]}) == 5


def test_prompt_logprobs_in_chunks_and_after_a_hit() -> None:
    items, params = prompts(5, seed=3), greedy(2, prompt_logprobs=2)
    cached = LLM(dtype="float32")
    cached.generate(items, greedy(2))
    chunked = LLM(max_num_batched_tokens=9, max_num_seqs=3, dtype="float32")
    for prompt, one, other in zip(
        items, cached.generate(items, params), chunked.generate(items, params), strict=True
    ):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == len(prompt) and one.prompt_logprobs[0] is None
        for token, a, b in zip(
            prompt[1:], one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True
        ):
            assert a is not None and b is not None
            assert token in a and list(a) == list(b)
            if ops.has_native("linear"):
                assert [p.logprob for p in a.values()] == [p.logprob for p in b.values()]


def test_few_rows_of_logits_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in a step: or their logits, each as wide as the vocabulary, would fill memory."""
    rng = random.Random(5)
    items = [[rng.randrange(3, 512) for _ in range(300)] for _ in range(3)]
    params = greedy(3, prompt_logprobs=0)
    llm = LLM(dtype="float32", max_model_len=400)
    assert llm.engine.config.scheduler.max_num_batched_tokens >= 900
    forward, rows = llm.runtime.runner.forward, []

    def counted(step: Any) -> Any:
        rows.append(len(step.sample_at))
        return forward(step)

    monkeypatch.setattr(llm.runtime.runner, "forward", counted)
    together = llm.generate(items, params)
    assert max(rows) <= 256 + len(items) and sum(rows) >= 3 * 299
    whole = LLM(dtype="float32", max_model_len=400, enable_chunked_prefill=False)
    for one, other in zip(together, whole.generate(items, params), strict=True):
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == 300
        if ops.has_native("linear"):
            assert one.prompt_logprobs == other.prompt_logprobs
        assert seen(one) == seen(other)


def test_prompts_whose_logits_are_read_hold_up_nobody() -> None:
    """Others pass those that wait for rows of logits; who begins like one computes it too."""
    rng = random.Random(6)
    engine = LLM(dtype="float32", max_model_len=400).engine
    items = [[rng.randrange(3, 512) for _ in range(380)] for _ in range(5)]
    for at, item in enumerate(items):
        engine.add_request(f"read {at}", item, greedy(2, prompt_logprobs=0))
    plain = {"short": [*items[0][:20], 7], "alike": [*items[0][:370], 7, 8]}
    for name, item in plain.items():
        engine.add_request(name, item, greedy(2))
    ended: dict[str, int] = {}
    steps = 0
    while engine.has_unfinished:
        steps += 1
        ended |= {output.request_id: steps for output in engine.step() if output.finished}
    assert ended["short"] == ended["alike"] == 2
    assert [ended[f"read {at}"] for at in range(5)] == sorted(
        ended[f"read {at}"] for at in range(5)
    )
    assert 8 <= steps <= 10  # 1,900 rows, 256 in a step

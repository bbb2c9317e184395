"""What one request asks for: when it ends, what it shows, what it is refused for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import RequestError
from penstock.sampling import SamplingParams
from penstock.step import KV, Step
from penstock.tokenizer import Tokenizer

from .letters import tokenizer
from .toy import (
    VOCAB,
    check,
    drain,
    logits_of,
    reference,
    run_one,
    toy_engine,
    toy_runtime,
    watch,
)

PROMPT = [10, 20, 30, 40, 50]


def greedy(max_tokens: int | None = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


@pytest.fixture
def letters() -> Tokenizer:
    return tokenizer()


@pytest.fixture
def spoken(letters: Tokenizer) -> Engine:
    """A toy with a tokenizer; token 1 ends its answers."""
    engine = Engine(EngineConfig.of(max_num_seqs=8), toy_runtime(tokenizer=letters, eos=(1,)))
    watch(engine)
    return engine


def says(engine: Engine, tokens: list[int]) -> None:
    """Make the model answer every prompt of one token with these tokens, whatever it computes."""
    answers = [*tokens, 5]

    def forward(step: Step, kv: KV) -> Tensor:
        logits = torch.full((step.sample_at.shape[0], VOCAB), -5.0)
        for row, at in enumerate(step.sample_at.tolist()):
            logits[row, answers[min(int(step.positions[at]), len(tokens))]] = 5.0
        return logits

    engine.runtime.runner._forward = forward


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 2, 30])
def test_max_tokens(count: int) -> None:
    engine = toy_engine()
    (sample,) = run_one(engine, PROMPT, greedy(count)).outputs
    assert len(sample.token_ids) == count
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)


def test_the_context_ends_it() -> None:
    engine = toy_engine(max_model_len=40)
    for params in (greedy(None), greedy(1000)):
        (sample,) = run_one(engine, PROMPT, params).outputs
        assert len(PROMPT) + len(sample.token_ids) == 40
        assert sample.finish_reason == "length"
        assert sample.token_ids == reference(PROMPT, params, max_model_len=40)
    longest = [3] * 39
    assert len(run_one(engine, longest, greedy(None)).outputs[0].token_ids) == 1


def test_end_tokens() -> None:
    free = reference(PROMPT, greedy(30))
    end = free[6]
    first = free.index(end)
    engine = toy_engine(eos=(end, 60))
    (sample,) = run_one(engine, PROMPT, greedy(30)).outputs
    assert sample.token_ids == free[: first + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    (sample,) = run_one(engine, PROMPT, greedy(30, ignore_eos=True)).outputs
    assert sample.token_ids == free


def test_stop_token_ids() -> None:
    free = reference(PROMPT, greedy(30))
    stop = free[9]
    params = greedy(30, stop_token_ids=[stop, 61], ignore_eos=True)
    (sample,) = run_one(toy_engine(eos=(stop,)), PROMPT, params).outputs
    assert sample.token_ids == free[: free.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("minimum", [1, 7, 20])
def test_min_tokens(minimum: int) -> None:
    """Ends are not drawn before: the answer differs from the free one where it would end."""
    free = reference(PROMPT, greedy(30))
    eos = tuple(set(free[:4]))
    params = greedy(30, min_tokens=minimum)
    (sample,) = run_one(toy_engine(eos=eos), PROMPT, params).outputs
    assert sample.token_ids == reference(PROMPT, params, eos=eos)
    assert not set(sample.token_ids[:minimum]) & set(eos)


def test_n_samples_of_one_token() -> None:
    """They fork and end in the same step."""
    engine = toy_engine()
    params = SamplingParams(n=5, seed=2, max_tokens=1)
    engine.add_request("it", PROMPT, params)
    (output,) = engine.step()
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3, 4]
    for sample in output.outputs:
        assert sample.token_ids == reference(PROMPT, params, index=sample.index)
    assert engine.pool.num_used == 0
    check(engine)


def test_samples_end_at_different_times() -> None:
    engine = toy_engine(eos=(4, 5, 6, 7, 8, 9))
    params = SamplingParams(n=6, seed=3, temperature=2.0, max_tokens=25)
    output = run_one(engine, PROMPT, params)
    assert len({len(sample.token_ids) for sample in output.outputs}) > 2
    for sample in output.outputs:
        want = reference(PROMPT, params, index=sample.index, eos=(4, 5, 6, 7, 8, 9))
        assert sample.token_ids == want


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_string_across_token_borders(spoken: Engine, letters: Tokenizer) -> None:
    says(spoken, letters.encode("hello world abc"))
    for stop, text in (("lo wo", "hel"), ("d", "hello worl"), ("o", "hell"), ("zz", None)):
        params = greedy(15, stop=[stop, "QQ"])
        (sample,) = run_one(spoken, [2], params).outputs
        if text is None:
            assert sample.finish_reason == "length"
            assert sample.text == "hello world abcd"[: len(sample.text)]
        else:
            assert sample.text == text
            assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        shown = greedy(15, stop=stop, include_stop_str_in_output=True)
        if text is not None:
            assert run_one(spoken, [2], shown).outputs[0].text == text + stop


def test_no_part_of_a_stop_string_is_streamed(spoken: Engine, letters: Tokenizer) -> None:
    says(spoken, letters.encode("hello world abc"))
    spoken.add_request("it", [2], greedy(20, stop="world"), stream=True)
    texts = []
    while spoken.has_unfinished:
        texts += [output.outputs[0].text for output in spoken.step()]
    assert texts[-1] == "hello "
    assert all("hello ".startswith(text) for text in texts)


def test_what_was_held_back_is_shown_at_the_end(spoken: Engine, letters: Tokenizer) -> None:
    says(spoken, letters.encode("hello wor"))
    count = len(letters.encode("hello wor"))
    (sample,) = run_one(spoken, [2], greedy(count, stop="world")).outputs
    assert sample.text == "hello wor"


def test_half_a_character_is_never_streamed(spoken: Engine, letters: Tokenizer) -> None:
    says(spoken, [*letters.encode("aé"), *letters.encode("é")[:1]])
    spoken.add_request("it", [2], greedy(4), stream=True)
    texts = []
    while spoken.has_unfinished:
        texts += [output.outputs[0].text for output in spoken.step()]
    assert texts == ["a", "a", "aé", "aé\ufffd"]


def test_end_tokens_in_the_text(spoken: Engine, letters: Tokenizer) -> None:
    says(spoken, [*letters.encode("abc"), 1, 9])
    (sample,) = run_one(spoken, [2], greedy(8, skip_special_tokens=False)).outputs
    assert (sample.text, sample.token_ids[-1]) == ("abc", 1)
    shown = greedy(8, skip_special_tokens=False, include_stop_str_in_output=True)
    assert run_one(spoken, [2], shown).outputs[0].text == "abc</s>"
    stop = letters.encode("c")[0]
    (sample,) = run_one(spoken, [2], greedy(8, stop_token_ids=[stop])).outputs
    assert (sample.text, sample.stop_reason) == ("ab", stop)
    shown = greedy(8, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert run_one(spoken, [2], shown).outputs[0].text == "abc"


def test_min_tokens_and_stop_strings(spoken: Engine, letters: Tokenizer) -> None:
    """A stop string counts once min_tokens are there, as in vLLM."""
    says(spoken, letters.encode("xyxyxyxy"))
    (sample,) = run_one(spoken, [2], greedy(8, stop="xy", min_tokens=3)).outputs
    assert len(sample.token_ids) > 3
    assert sample.text == "xyxy"[: len(sample.text)]
    assert sample.stop_reason == "xy"


def test_without_a_tokenizer_there_is_no_text() -> None:
    engine = toy_engine()
    assert run_one(engine, PROMPT, greedy()).outputs[0].text == ""
    with pytest.raises(RequestError, match="Stop strings need a tokenizer"):
        engine.add_request("it", PROMPT, greedy(stop="a"))


def test_detokenize_off(spoken: Engine) -> None:
    (sample,) = run_one(spoken, PROMPT, greedy(detokenize=False)).outputs
    assert sample.text == "" and sample.token_ids


def test_a_stop_string_of_a_million_characters(spoken: Engine) -> None:
    start = time.perf_counter()
    (sample,) = run_one(spoken, PROMPT, greedy(8, stop="x" * 1_000_000, ignore_eos=True)).outputs
    assert sample.finish_reason == "length"
    assert time.perf_counter() - start < 5.0


# ── the same in any company ──────────────────────────────────────────────────────────────────────


def test_seeds() -> None:
    """The same seed and prompt give the same tokens, alone or in any batch, in any place."""
    params = SamplingParams(seed=11, temperature=1.3, max_tokens=15)
    want = reference(PROMPT, params)
    assert run_one(toy_engine(), PROMPT, params).outputs[0].token_ids == want
    engine = toy_engine()
    for i in range(6):
        other = SamplingParams(seed=None if i % 2 else i, max_tokens=3 * i + 1)
        engine.add_request(f"other {i}", [i, 2, 3], other)
        if i == 3:
            engine.step()
            engine.add_request("it", PROMPT, params)
    assert drain(engine)["it"].outputs[0].token_ids == want


def test_the_engine_seed() -> None:
    """Requests without a seed differ from each other, and repeat with the engine's seed."""

    def run(seed: int) -> list[list[int]]:
        engine = toy_engine(seed=seed)
        for i in range(4):
            engine.add_request(str(i), PROMPT, SamplingParams(temperature=2.0, max_tokens=10))
        return [output.outputs[0].token_ids for output in drain(engine).values()]

    first = run(0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert run(0) == first != run(1)


def test_logprobs_of_the_toy() -> None:
    params = greedy(6, logprobs=2, prompt_logprobs=1)
    output = run_one(toy_engine(max_num_batched_tokens=8, max_num_seqs=2), PROMPT * 3, params)
    (sample,) = output.outputs
    assert sample.logprobs is not None and output.prompt_logprobs is not None
    tokens = PROMPT * 3 + sample.token_ids
    found = output.prompt_logprobs + sample.logprobs
    assert found[0] is None and len(found) == len(tokens)
    for i in range(1, len(tokens)):
        row = torch.from_numpy(logits_of(tokens[:i])).log_softmax(-1)
        entry = found[i]
        assert entry is not None
        assert entry[tokens[i]].logprob == row[tokens[i]].item()
        assert entry[tokens[i]].rank == int((row > row[tokens[i]]).sum()) + 1

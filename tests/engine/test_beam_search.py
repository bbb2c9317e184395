"""Beam search through the engine: the search's own result, whatever else runs; transformers'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.engine.outputs import CompletionOutput
from penstock.errors import InvalidSamplingError, RequestError
from penstock.sampling import BeamSearch, BeamSearchParams, Hypothesis, log_probabilities
from tests.engine.toy import IS_NAN, VOCAB, check, drain, logits_of, run_one, toy_engine
from tests.engine.toy import reference as sampled
from tests.models.tiny import make_tiny

EOS = (7, 21, 40)


def reference(
    prompt: Sequence[int], params: BeamSearchParams, eos: tuple[int, ...] = EOS
) -> list[Hypothesis]:
    """The search alone, every sequence computed anew in every step."""
    search = BeamSearch(params, eos, VOCAB, 64 - len(prompt))
    beams: list[list[int]] = [[*prompt]]
    while not search.is_done:
        logits = torch.stack([torch.from_numpy(logits_of(beam)) for beam in beams])
        going_on = search.advance(log_probabilities(logits, params))
        beams = [[*beams[one.parent], one.token] for one in going_on]
    return search.best()


def same(found: Sequence[CompletionOutput], wanted: Sequence[Hypothesis]) -> None:
    assert [(x.token_ids, x.score, x.cumulative_logprob, x.finish_reason) for x in found] == [
        (x.tokens, x.score, x.logprob, x.finish_reason) for x in wanted
    ]


def params(width: int = 4, **more: Any) -> BeamSearchParams:
    given: dict[str, Any] = {"max_tokens": 12}
    return BeamSearchParams(width, **(given | more))


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("caching", [True, False])
def test_the_search_alone_finds_the_same(width: int, caching: bool) -> None:
    engine = toy_engine(160, eos=EOS, enable_prefix_caching=caching)
    for length in (1, 4, 9):
        for penalty in (0.0, 1.0, 2.0):
            chosen = params(width, length_penalty=penalty)
            found = run_one(engine, range(length), chosen)
            same(found.outputs, reference(range(length), chosen))
            assert found.finished
    assert engine.stats()["used_blocks"] == 0


def test_a_fork_copies_one_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(160)
    copied: list[int] = []
    copy = engine.runtime.runner.copy
    monkeypatch.setattr(
        engine.runtime.runner, "copy", lambda pairs: (copied.append(len(pairs)), copy(pairs))
    )
    engine.add_request("it", range(18), params(8, max_tokens=20))
    most = 0
    while engine.has_unfinished:
        engine.step()
        check(engine)
        most = max(most, engine.pool.num_used)
    assert copied and max(copied) <= 7  # of eight beams one at least stays where it is
    assert most <= 4 + 8 * 6  # the prompt's four full blocks are there once
    assert engine.stats()["used_blocks"] == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_many_that_crowd_each_other_out(mode: str) -> None:
    rng = random.Random(3)
    swap: dict[str, Any] = {"swap_space": 1e-4} if mode == "swap" else {}
    engine = toy_engine(
        37, 40, max_num_batched_tokens=40, max_num_seqs=24, preemption_mode=mode, eos=EOS,
        enable_prefix_caching=mode == "swap", **swap,
    )  # fmt: skip
    wanted: dict[str, tuple[list[int], Any]] = {}
    for i in range(20):
        prompt = [rng.randrange(60) for _ in range(rng.randrange(1, 20))]
        chosen: Any = params(rng.randrange(1, 5), max_tokens=rng.randrange(1, 14))
        if i % 3 == 0:
            chosen = SamplingParams(n=2, seed=i, max_tokens=rng.randrange(1, 20))
        engine.add_request(str(i), prompt, chosen)
        wanted[str(i)] = (prompt, chosen)
    done = drain(engine)
    for name, (prompt, chosen) in wanted.items():
        if isinstance(chosen, BeamSearchParams):
            same(done[name].outputs, reference(prompt, chosen))
        else:
            for k, sample in enumerate(done[name].outputs):
                want = sampled(prompt, chosen, index=k, eos=EOS, max_model_len=40)
                assert sample.token_ids == want
    assert engine.stats()["preemptions"] > 0
    assert engine.stats()["used_blocks"] == 0


def test_aborted_and_failed() -> None:
    engine = toy_engine(160)
    engine.add_request("aborted", [1, 2, 3], params())
    engine.add_request("broken", [1, IS_NAN], params())
    engine.add_request("other", [1, 2, 3], params())
    done = {output.request_id: output for output in engine.step() if output.finished}
    engine.step()
    engine.abort("aborted")
    check(engine)
    done |= drain(engine)
    assert {x.finish_reason for x in done["aborted"].outputs} == {"abort"}
    assert "NaN" in str(done["broken"].error)
    same(done["other"].outputs, reference([1, 2, 3], params(), ()))


def test_what_could_never_run_is_refused() -> None:
    engine = toy_engine(12, 40, max_num_seqs=3)
    with pytest.raises(RequestError, match="n=4 samples can't run at once: max_num_seqs is 3"):
        engine.add_request("it", [1], params(4))
    with pytest.raises(RequestError, match="may need 27 blocks of 4 tokens"):
        engine.add_request("it", [1, 2], params(3, max_tokens=30))
    with pytest.raises(RequestError, match="Stop strings need a tokenizer"):
        engine.add_request("it", [1, 2], params(2, stop="a"))
    assert not engine.has_unfinished


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt2"])
def test_transformers_finds_the_same(name: str, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    prompts = [[5, 9, 3, 7], [11, 2, 30, 8, 1, 6, 19], [4] * 35]
    llm = LLM(tiny.folder, dtype="float32", skip_tokenizer_init=True, max_model_len=64)
    ends = sorted(llm.runtime.model.eos_token_ids)
    for width in (2, 4, 8):
        for penalty in (0.0, 1.0, -0.5):
            chosen = params(width, length_penalty=penalty, max_tokens=10)
            for prompt, output in zip(prompts, llm.beam_search(prompts, chosen), strict=True):
                want = tiny.oracle.generate(
                    torch.tensor([prompt]), num_beams=width, num_return_sequences=width,
                    do_sample=False, max_new_tokens=10, length_penalty=penalty, eos_token_id=ends,
                    pad_token_id=0, return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
                tokens = [one.tokens[len(prompt) :] for one in output.sequences]
                padded = [found + [0] * (10 - len(found)) for found in tokens]
                theirs = want.sequences[:, len(prompt) :].tolist()
                assert [one[: len(theirs[0])] for one in padded] == theirs
                scores = [one.score for one in output.sequences]
                assert scores == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


def test_text_stops_and_forms(llm: LLM) -> None:
    (plain,) = llm.beam_search("Once upon a time there was a", params(max_tokens=16))
    best = plain.sequences[0]
    assert best.text.startswith("Once upon a time there was a little")
    by_sum = params(max_tokens=16, stop=" girl", length_penalty=0.0)
    (output,) = llm.beam_search("Once upon a time there was a", by_sum)
    stopped = [one for one in output.sequences if one.stop_reason == " girl"]
    assert stopped
    texts = {one.output_text: one.text for one in stopped}
    assert texts[" little"] == "Once upon a time there was a little"
    assert not any("girl" in text for text in texts.values())
    form = {"choice": ["red", "green", "blue"]}
    (output,) = llm.beam_search("The ball was ", params(3, structured_outputs=form))
    assert {one.output_text for one in output.sequences} <= {"blue", "green", "red"}
    assert len({tuple(one.tokens) for one in output.sequences}) == 3
    assert all(one.finish_reason == "stop" for one in output.sequences)
    with pytest.raises(InvalidSamplingError, match="must be BeamSearchParams"):
        llm.beam_search("Once", SamplingParams())  # type: ignore[arg-type]


def test_wider_is_never_worse_than_greedy_here(llm: LLM) -> None:
    for prompt in ("The dog", "One day"):
        found = [llm.beam_search(prompt, params(w, max_tokens=10))[0] for w in (1, 4)]
        greedy, wide = (output.sequences[0].cum_logprob for output in found)
        assert wide >= greedy

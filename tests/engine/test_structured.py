"""Outputs that follow a form: through the engine, with everything else a request may ask."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidSamplingError, RequestError
from penstock.sampling import Bits, Constraint
from tests.engine.toy import drain, toy_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_child": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "favourite_animal": {"enum": ["hedgehog", "butterfly", "hummingbird"]},
    },
    "required": ["name_of_the_child", "age", "favourite_animal"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"[a-z]{3}-[0-9]{2}(-end of the line)?"},
    {"choice": ["a red balloon", "a red ball", "green"]},
    {"grammar": 'start: "The " ("cat" | "dog") " sat on the mat."'},
    None,  # type: ignore[list-item]
]
PROMPTS = ["Once upon a time", "The dog", "There was", "One day, Lily went", "Tom and Sue"]


def params(form: dict[str, Any] | None, i: int = 0, **more: Any) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": 90, "seed": i, "temperature": 1.0}
    return SamplingParams(structured_outputs=form, **(given | more))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_num_seqs=16)


@pytest.fixture(scope="module")
def stepwise() -> LLM:
    return LLM(dtype="float32", enable_jump_forward=False, max_num_seqs=1)


def run(llm: LLM, **more: Any) -> list[Any]:
    """Twice every form, in one batch."""
    several = [params(form, i, **more) for i, form in enumerate(FORMS * 2)]
    found = llm.generate(PROMPTS * 2, several)
    assert llm.stats()["used_blocks"] == 0
    return [
        [(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs]
        for output in found
    ]


@pytest.fixture(scope="module")
def alone(stepwise: LLM) -> list[Any]:
    """Each by itself, token by token."""
    found = run(stepwise)
    assert stepwise.stats()["jumped_tokens"] == 0
    return found


def test_jumping_over_forced_tokens_changes_nothing_but_the_steps(
    llm: LLM, stepwise: LLM, alone: list[Any]
) -> None:
    before = llm.stats()["steps"]
    assert run(llm) == alone
    assert llm.stats()["jumped_tokens"] > 50
    assert llm.stats()["steps"] - before < stepwise.stats()["steps"] / 3


def test_in_chunks_with_preemption_and_without_the_prefix_cache(alone: list[Any]) -> None:
    small = LLM(
        dtype="float32", max_num_seqs=6, max_num_batched_tokens=9, num_gpu_blocks_override=4,
        max_model_len=128, enable_prefix_caching=False, preemption_mode="recompute",
    )  # fmt: skip
    assert run(small) == alone
    assert small.stats()["preemptions"] > 0


def test_log_probabilities_come_with_every_token(llm: LLM, alone: list[Any]) -> None:
    several = [params(form, i, logprobs=2) for i, form in enumerate(FORMS)]
    before = llm.stats()["jumped_tokens"]
    for output, want in zip(llm.generate(PROMPTS, several), alone, strict=False):
        (sample,) = output.outputs
        assert (sample.token_ids, sample.text) == want[0][:2]
        assert sample.logprobs is not None
        assert [next(iter(at)) for at in sample.logprobs] == sample.token_ids
    assert llm.stats()["jumped_tokens"] == before


def test_what_min_tokens_forbids_is_not_jumped_over(llm: LLM, stepwise: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    stops = tokenizer.encode(" brown fox", add_special_tokens=False)
    form = {"choice": ["the slow brown fox who"]}
    given = params(form, stop_token_ids=stops, min_tokens=8)
    found = [one.generate("Once", given)[0].outputs[0] for one in (llm, stepwise)]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].finish_reason == found[1].finish_reason == "error"


def test_samples_differ_and_each_follows_the_form(llm: LLM) -> None:
    (output,) = llm.generate("Once", params({"json": SCHEMA}, 4, n=6, max_tokens=200))
    texts = [sample.text for sample in output.outputs]
    assert len(set(texts)) == 6
    for sample in output.outputs:
        assert sample.finish_reason == "stop"
        value = json.loads(sample.text)
        assert list(value) == SCHEMA["required"]
        assert 1 <= value["age"] <= 120


def test_a_text_that_is_cut_says_so(llm: LLM) -> None:
    (output,) = llm.generate("Once", params({"json": SCHEMA}, max_tokens=7))
    (sample,) = output.outputs
    assert sample.finish_reason == "length"
    assert len(sample.token_ids) == 7
    assert sample.text.startswith("{")


def test_stop_rules_go_on(llm: LLM) -> None:
    form = {"grammar": 'start: "The cat sat on the mat."'}
    (output,) = llm.generate("Once", params(form, stop=" on"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("The cat sat", " on")
    (output,) = llm.generate("Once", params(form, min_tokens=80, max_tokens=90))
    assert output.outputs[0].text == "The cat sat on the mat."  # complete: nothing may follow


def test_the_end_comes_where_the_form_allows_it(llm: LLM) -> None:
    for seed in range(8):
        (output,) = llm.generate("Once", params({"regex": "[ab]{2,9}"}, seed, temperature=3.0))
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch("[ab]{2,9}", output.outputs[0].text)


def test_every_model_end_is_one(llm: LLM) -> None:
    """Bans beside the form: what is left is chosen, and nothing left is an error of its own."""
    form = {"choice": ["yes", "no"]}
    tokenizer = llm.get_tokenizer()
    yes = set(tokenizer.encode("yes", add_special_tokens=False))
    (output,) = llm.generate("Once", params(form, logit_bias=dict.fromkeys(yes, -100.0)))
    assert output.outputs[0].text in ("yes", "no")
    with pytest.raises(InvalidSamplingError, match="none of them is left"):
        llm.generate("Once", params(form, allowed_token_ids=[3]))
    first = tokenizer.encode("n", add_special_tokens=False)
    (output,) = llm.generate("Once", params({"regex": "nz"}, allowed_token_ids=first))
    assert output.outputs[0].finish_reason == "error"
    assert "Nothing is left for token 2 of the output" in str(output.error)


def test_what_cannot_be_followed_is_refused_before_it_starts(llm: LLM) -> None:
    with pytest.raises(InvalidSamplingError, match=r"structured_outputs\.regex can't be followed"):
        llm.generate("Once", params({"regex": "(a"}))
    with pytest.raises(InvalidSamplingError, match="ignore_eos is set beside structured_outputs"):
        params({"regex": "a"}, ignore_eos=True)
    with pytest.raises(InvalidSamplingError, match="takes one of json, regex"):
        params({"regex": "a", "choice": ["b"]})
    bare = toy_engine()
    with pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        bare.add_request("it", [1], params({"regex": "a"}))
    assert not bare.has_unfinished


class Broken:
    """A constraint that breaks after some tokens."""

    is_complete = is_over = may_end = False

    def __init__(self, place: str) -> None:
        self.place, self.count = place, 0

    def fill(self, bits: Bits) -> None:
        if self.place == "fill" and self.count == 2:
            raise RuntimeError("the grammar broke")
        bits[:] = np.int32(-1)

    def accept(self, token_id: int) -> None:
        self.count += 1
        if self.place == "accept" and self.count == 2:
            raise RequestError("the grammar broke")

    def forced(self) -> list[int]:
        if self.place == "forced" and self.count == 2:
            raise RequestError("the grammar broke")
        return []

    def fork(self) -> Constraint:
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("place", ["fill", "accept", "forced"])
def test_one_that_breaks_fails_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    engine.add_request("before", [1, 2], plain)
    constraint = Broken(place)
    monkeypatch.setattr(engine.intake, "_constraint", lambda request: constraint)
    engine.add_request("broken", [3, 4], plain)
    monkeypatch.undo()
    engine.add_request("after", [1, 2], plain)
    done = drain(engine)
    assert "the grammar broke" in str(done["broken"].error)
    assert len(done["broken"].outputs[0].token_ids) == 2
    want = done["before"].outputs[0].token_ids
    assert len(want) == 6
    assert done["after"].outputs[0].token_ids == want


def test_a_form_that_bans_leave_nothing_of_ends_with_what_it_has(llm: LLM) -> None:
    """In the middle of an answer, with the place and the reason; those beside it go on."""
    tokenizer = llm.get_tokenizer()
    ids = {one: i for i in range(512) for one in [tokenizer.token_bytes(i)] if len(one) == 1}
    plain = params({"choice": ["abcd"]}, temperature=0.0)
    allowed = params({"regex": "ab[xy]"}, allowed_token_ids=[ids[b"a"], ids[b"b"]])
    words = params({"regex": "[ab]{3}(xy|xz){2}"}, bad_words=["x"])
    several = [plain, allowed, words, plain]
    before, cut, worded, after = llm.generate(["Once"] * 4, several)
    for output in (before, after):
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abcd", "stop")
        assert output.error is None
    (sample,) = cut.outputs
    assert (sample.text, sample.finish_reason) == ("ab", "error")
    assert "token 3 of the output: its form lets 2 come there, such as" in str(cut.error)
    assert "allowed_token_ids bans them" in str(cut.error)
    (sample,) = worded.outputs
    assert re.fullmatch("[ab]{3}", sample.text)
    assert sample.finish_reason == "error"
    assert "bad_words bans them" in str(worded.error)
    assert llm.stats()["used_blocks"] == 0

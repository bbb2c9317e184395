"""Several tokens of a step are appended at once: to the same end as one by one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.appender import Appender

LOOP = "The cat sat on the mat. " * 12
STORY = "Once upon a time there was a little dog named Tim. Tim liked to run in the park. "


@pytest.fixture(scope="module")
def guessing() -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False}
    return LLM(speculative_config=config, max_model_len=256)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(max_model_len=256)


CASES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 23},
    {"max_tokens": 24},
    {"max_tokens": None},  # up to the context's end
    {"ignore_eos": False},
    {"ignore_eos": False, "min_tokens": 40},
    {"stop": [" cat sat"]},
    {"stop": [" cat sat"], "include_stop_str_in_output": True, "min_tokens": 30},
    {"stop_token_ids": "seen"},
    {"stop_token_ids": "seen", "min_tokens": 50},
    {"detokenize": False},
    {"logprobs": 1},
    {"n": 3, "temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1, "seed": 2},
    {"skip_special_tokens": False, "ignore_eos": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("prompt", [LOOP, STORY * 3], ids=["loop", "story"])
def test_what_ends_where_it_would_have(
    case: dict[str, Any], prompt: str, guessing: LLM, plain: LLM
) -> None:
    case = {"temperature": 0.0, "max_tokens": 70, "ignore_eos": True, **case}
    if case.get("stop_token_ids") == "seen":  # the token that a plain run's 31st is
        free = {**case, "stop_token_ids": None, "min_tokens": 0}
        (output,) = plain.generate([prompt], SamplingParams(**free))
        case["stop_token_ids"] = output.outputs[0].token_ids[30:31]
    params = SamplingParams(**case)
    (want,), (got,) = plain.generate([prompt], params), guessing.generate([prompt], params)
    assert got.outputs == want.outputs
    assert len(got.metrics.token_times) == len(want.metrics.token_times)


def test_right_guesses_are_appended_at_once(guessing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    append_all = Appender.append_all

    def noted(self: Appender, sequence: Any, tokens: list[int], now: float) -> bool:
        done = append_all(self, sequence, tokens, now)
        lengths.append(len(tokens) if done else 0)
        return done

    monkeypatch.setattr(Appender, "append_all", noted)
    before = guessing.engine.token_counts.generated
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (output,) = guessing.generate([LOOP], params)
    assert max(lengths) > 4
    assert guessing.engine.token_counts.generated - before == len(output.outputs[0].token_ids) == 60
    guessing.generate([LOOP], SamplingParams(temperature=0.0, max_tokens=60, logprobs=0))
    assert lengths[-1] == 0

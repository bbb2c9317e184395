"""A form whose lexer's states are used up, by guesses too: the text is that of a roomy one."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.grammar import matcher
from penstock.grammar.state import GrammarState
from penstock.sampling.structured import StructuredOutputs

FORM = StructuredOutputs(regex="(?s:.)*a(?s:.){20}b(?s:.){20}c")
PROMPTS = ["Tom has a cat and a bat. Tom has a cat and", "Once upon a time a bad"]
PARAMS = SamplingParams(
    temperature=1.0, seed=7, max_tokens=140, min_tokens=140, structured_outputs=FORM
)


def outputs(drafts: dict[str, object] | None) -> list[tuple[int, ...]]:
    llm = LLM("stories", max_model_len=256, speculative_config=drafts)
    found = llm.generate(PROMPTS, PARAMS)
    if drafts is not None:
        assert llm.stats()["spec_decode_num_draft_tokens"] > 50
    return [tuple(one.outputs[0].token_ids) for one in found]


def test_a_text_outlives_its_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ever fewer states, until they are used up shortly before the end."""
    roomy = outputs(None)
    assert [len(tokens) for tokens in roomy] == [140, 140]
    states = 32_000
    renewed = list[bool]()
    real = GrammarState._renew

    def renew(self: GrammarState) -> bool:
        renewed.append(real(self))
        return renewed[-1]

    monkeypatch.setattr(GrammarState, "_renew", renew)
    drafts = {"model": "stories", "quantization": "w4a8", "num_speculative_tokens": 4,
              "adaptive": False}  # fmt: skip
    while not any(renewed):
        states = states * 4 // 5
        monkeypatch.setattr(matcher, "LEXER_STATES", states)
        assert outputs(drafts) == roomy

"""Requests whose prompt's end is chosen anew, through the engine and the embedded model."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.request import Request
from penstock.errors import InvalidSamplingError, RequestError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=128, max_num_seqs=4)


@pytest.fixture(scope="module")
def bare() -> LLM:
    return LLM(max_model_len=128, max_num_seqs=4, skip_tokenizer_init=True)


def healed(llm: LLM, prompt: str | list[int], **params: object) -> Request:
    """The request as it is queued; it is aborted."""
    chosen = SamplingParams(token_healing=True, **params)  # type: ignore[arg-type]
    ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    llm.engine.add_request("healed", ids, chosen)
    request = llm.engine.requests["healed"]
    llm.engine.abort("healed", report=False)
    return request


PROMPTS = ["Once upon a ti", "The little gi", "One day, Tom we", "Lily was very hap", '"Hello," sa']


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_healed_prompt_goes_on_in_natural_tokens(llm: LLM, prompt: str) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(prompt)
    params = SamplingParams(
        token_healing=True,
        temperature=0,
        max_tokens=12,
        logprobs=0,
    )
    (output,) = llm.generate([prompt], params)
    (sample,) = output.outputs
    kept = ids[: len(ids) - output.num_taken_back]
    assert output.num_taken_back > 0
    assert output.prompt_token_ids == ids
    assert len(sample.token_ids) == 12
    assert len(sample.logprobs or []) == 12
    assert kept + sample.token_ids == tokenizer.encode(prompt + sample.text)
    assert tokenizer.encode(prompt + sample.text)[: len(ids)] != ids
    (unhealed,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    assert unhealed.outputs[0].text[:6] != sample.text[:6]


def test_what_a_request_keeps(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = "Once upon a ti"
    ids = tokenizer.encode(prompt)
    request = healed(llm, ids, n=2, seed=1)
    assert request.given == ids
    assert request.prompt_token_ids == ids[: len(ids) - len(request.taken_back)]
    assert request.prefix == b"".join(map(tokenizer.token_bytes, request.taken_back))
    assert request.output().prompt_token_ids == ids
    assert request.output().num_taken_back == len(request.taken_back)
    for sequence in request.sequences:
        assert sequence.tokens == request.prompt_token_ids
        constraint = llm.engine.intake.prefix_constraint(request)
        assert constraint is not None
        assert not constraint.is_over
    bos = ids[:1]
    whole = healed(llm, bos)
    assert (whole.prompt_token_ids, whole.taken_back, whole.prefix) == (bos, [], b"")
    assert llm.engine.intake.prefix_constraint(whole) is None


def test_where_it_cannot_be(llm: LLM, bare: LLM) -> None:
    params = SamplingParams(token_healing=True)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidSamplingError, match="token_healing is of completions"):
        llm.chat(messages, params)
    with pytest.raises(InvalidSamplingError, match="token_healing is of completions"):
        llm.chat([messages, messages], [SamplingParams(), params])
    with pytest.raises(RequestError, match="token_healing needs a tokenizer"):
        bare.generate([[1, 2, 3]], params)
    assert bare.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].num_taken_back == 0

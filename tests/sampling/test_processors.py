"""A caller's own logits processors: what they see, what they change, and that they fail alone."""

from __future__ import annotations

import re

import pytest
import torch
from sampling_cases import chosen, normal_logits, sequence

from penstock import LLM, SamplingParams
from penstock.errors import InvalidSamplingError, RequestError
from penstock.sampling import Sampler

V = 30


def row(processors, **params):
    return sequence(V, temperature=0.0, logits_processors=processors, text=[5, 6, 7], prompt=[5],
                    **params)  # fmt: skip


class Only:
    """Leaves one token; notes its calls."""

    def __init__(self, token, in_place=False):
        self.token, self.in_place, self.calls = token, in_place, []

    def __call__(self, rows, logits):
        self.calls.append((rows, tuple(logits.shape)))
        mask = torch.ones_like(logits, dtype=torch.bool)
        mask[:, self.token] = False
        if self.in_place:
            logits.masked_fill_(mask, -torch.inf)
            return None
        return logits.masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_of_one_processor_come_in_one_call(in_place):
    nine, three = Only(9, in_place), Only(3, in_place)
    rows = [row([nine]), row(None), row([three]), row([nine])]
    logits = normal_logits(4, V)
    plain = chosen(logits[1:2], [row(None)])
    assert chosen(logits, rows) == [9, *plain, 3, 9]
    [(seen, shape)] = nine.calls
    assert shape == (2, V) and [s.prompt_token_ids for s in seen] == [(5,), (5,)]
    assert seen[0].output_token_ids == (6, 7) and seen[0].sample_index == 0
    assert len(three.calls) == 1


def test_several_run_in_their_order():
    def double(rows, logits):
        return logits * 2

    def add(rows, logits):
        return logits + torch.arange(V)

    logits = normal_logits(1, V)
    want = int((logits * 2 + torch.arange(V)).argmax())
    assert chosen(logits, [row([double, add])]) == [want]


def test_masks_come_after_them():
    assert chosen(normal_logits(1, V), [row([Only(9)], logit_bias={9: -1.0})]) == [9]
    found = Sampler(V)(normal_logits(1, V), [row([Only(9)], allowed_token_ids=[4])])
    assert "Every token is masked" in found.errors[0]


def test_one_that_raises_fails_its_row_alone():
    def picky(rows, logits):
        if any(r.sample_index == 1 for r in rows):
            raise KeyError("no such thing")
        return logits + torch.arange(V) * 100.0

    rows = [row([picky]), row([picky], sample_index=1), row(None), row([picky], sample_index=2)]
    logits = normal_logits(4, V)
    found = Sampler(V)(logits.clone(), rows)
    assert list(found.errors) == [1]
    assert "picky raised KeyError: 'no such thing'" in found.errors[1]
    assert found.token_ids[0] == found.token_ids[3] == V - 1
    assert found.token_ids[2] == chosen(logits[2:3], [row(None)])[0]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(V), r"returned \[30\] instead of \[1, 30\]"),
        ([0.0] * V, r"returned list instead of \[1, 30\]"),
        (torch.full((1, V), torch.nan), r"returned NaN or \+infinity"),
        (torch.full((1, V), torch.inf), r"returned NaN or \+infinity"),
    ],
)
def test_what_it_must_not_return(result, words):
    found = Sampler(V)(normal_logits(1, V), [row([lambda rows, logits: result])])
    assert re.search(words, found.errors[0])


def test_what_is_no_processor():
    with pytest.raises(InvalidSamplingError, match=r"logits_processors\[1\] is 3, an int"):
        SamplingParams(logits_processors=[print, 3])
    with pytest.raises(InvalidSamplingError, match="Pass a list of callables"):
        SamplingParams(logits_processors=print)


def test_in_an_engine():
    llm = LLM(num_gpu_blocks_override=40)
    token = llm.runtime.tokenizer.encode(" dog", add_special_tokens=False)[0]

    def fail(rows, logits):
        raise RuntimeError("broken on purpose")

    params = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[Only(token)]),
    ]
    prompt = llm.runtime.tokenizer.encode("Once upon")
    alone, changed = llm.generate([prompt] * 2, params)
    assert changed.outputs[0].token_ids == [token] * 4
    llm.engine.add_request("bad", prompt, SamplingParams(max_tokens=4, logits_processors=[fail]))
    llm.engine.add_request("good", prompt, params[0])
    outputs = {}
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            outputs[output.request_id] = output
    assert isinstance(outputs["bad"].error, RequestError)
    assert "fail raised RuntimeError: broken on purpose" in str(outputs["bad"].error)
    assert outputs["good"].outputs[0].token_ids == alone.outputs[0].token_ids

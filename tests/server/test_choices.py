"""Deltas join to the whole, and log-probabilities in each API's form."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.engine import CompletionOutput, RequestOutput
from penstock.engine.outputs import RequestMetrics
from penstock.sampling import TokenLogprobs
from penstock.sampling.logprobs import Logprob
from penstock.server.choices import (
    LOWEST_LOGPROB,
    Delta,
    Reader,
    TokenNames,
    finite,
    prompt_logprobs,
    whole,
)
from tests.server.conftest import Running


def _output(samples: list[CompletionOutput]) -> RequestOutput:
    finished = all(sample.finished for sample in samples)
    return RequestOutput("r", "p", [1], samples, finished, RequestMetrics(0.0))


def _entry(token: int, logprob: float = -1.0, rank: int = 1) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, f"<{token}>")}


def _sample(index: int, tokens: int, text: str, end: str | None = None) -> CompletionOutput:
    ids = list(range(tokens))
    stop: int | str | None = 7 if end == "stop" else None
    return CompletionOutput(index, text, ids, None, [_entry(x) for x in ids], end, stop)


@pytest.mark.parametrize("seed", range(25))
def test_deltas_join_to_the_whole(seed: int) -> None:
    """Whatever the engine shows, and however much of it a slow reader misses."""
    rng = random.Random(seed)
    full = ["".join(rng.choices("abc é☃", k=rng.randrange(40))) for _ in range(3)]
    count = [rng.randrange(1, 30) for _ in full]
    told = [[0, 0] for _ in full]  # tokens, characters
    ended = [False, False, False]
    reader = Reader(first_index=10)
    assert not reader.started
    joined: dict[int, list[Delta]] = {10: [], 11: [], 12: []}
    while not all(ended):
        samples = []
        for i, text in enumerate(full):
            if not ended[i]:
                told[i][0] = min(count[i], told[i][0] + rng.randrange(6))
                if told[i][0] == count[i] and rng.random() < 0.5:
                    ended[i], told[i][1] = True, len(text)
                elif told[i][0]:  # text comes late where a character or a stop string is open
                    told[i][1] = min(len(text), told[i][1] + rng.randrange(4))
            end = ("stop" if i else "length") if ended[i] else None
            samples.append(_sample(i, told[i][0], text[: told[i][1]], end))
        if rng.random() < 0.3 and not all(ended):
            continue  # never seen
        for delta in reader.read(_output(samples)):
            joined[delta.index].append(delta)
        assert reader.started
    assert list(reader.read(_output(samples))) == []  # an end is told once
    for i, text in enumerate(full):
        deltas = joined[10 + i]
        assert "".join(delta.text for delta in deltas) == text
        assert [x for delta in deltas for x in delta.token_ids] == list(range(count[i]))
        entries = [x for delta in deltas for x in delta.logprobs or []]
        assert entries == [_entry(x) for x in range(count[i])]
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = whole(samples[i], 10)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
            last.finish_reason,
            last.stop_reason,
        )
        assert (last.index, last.text, last.token_ids) == (10 + i, text, list(range(count[i])))


def test_nothing_new_is_nothing() -> None:
    reader = Reader()
    assert list(reader.read(_output([_sample(0, 0, "")]))) == []
    assert [d.text for d in reader.read(_output([_sample(0, 1, "a")]))] == ["a"]
    assert list(reader.read(_output([_sample(0, 1, "a")]))) == []
    (end,) = reader.read(_output([_sample(0, 1, "a", "abort")]))
    assert (end.text, end.token_ids, end.finish_reason) == ("", [], "abort")


def test_without_logprobs_there_are_none() -> None:
    sample = CompletionOutput(0, "a", [1])
    (delta,) = Reader().read(_output([sample]))
    assert delta.logprobs is None
    assert whole(sample).logprobs is None


@pytest.fixture
def names(server: Running) -> TokenNames:
    return TokenNames(server.service.prompts.tokenizer, as_ids=False)


def test_a_tokens_name_and_bytes(server: Running, names: TokenNames) -> None:
    tokenizer = server.service.prompts.tokenizer
    for token in (5, 300, tokenizer.vocab_size - 1):
        data = bytes(names.data(token) or [])
        assert data == tokenizer.token_bytes(token)
        assert names.name(token) == data.decode("utf-8", "replace")
    ids = TokenNames(tokenizer, as_ids=True)
    assert ids.name(5) == "token_id:5"
    assert bytes(ids.data(5) or []) == tokenizer.token_bytes(5)
    blind = TokenNames(None, as_ids=False)
    assert (blind.name(5), blind.data(5)) == ("token_id:5", None)


def _three(chosen: int) -> TokenLogprobs:
    """The chosen token first, then the best, as the engine orders them."""
    every = {5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.5, 2, "b"), 9: Logprob(-7.0, 31, "z")}
    return {chosen: every[chosen], **every}


def test_chats_form(names: TokenNames) -> None:
    found = names.chat([_three(9), _three(5)], top=2)
    assert found["refusal"] is None
    first, second = found["content"]
    assert first["token"] == names.name(9)
    assert first["logprob"] == -7.0
    assert first["bytes"] == names.data(9)
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.5]
    assert second["token"] == second["top_logprobs"][0]["token"] == names.name(5)
    assert names.chat([_three(9)], top=0)["content"][0]["top_logprobs"] == []


def test_completions_form(names: TokenNames) -> None:
    found = names.legacy([5, 9], [None, _three(9)], 2, 3)
    assert found["tokens"] == [names.name(5), names.name(9)]
    assert found["token_logprobs"] == [None, -7.0]
    best = {names.name(5): -0.5, names.name(6): -1.5, names.name(9): -7.0}
    assert found["top_logprobs"] == [None, best]  # the chosen one is always there, as one more
    assert names.legacy([5], [_three(5)], 1, 0)["top_logprobs"] == [{names.name(5): -0.5}]
    assert names.legacy([9], [_three(9)], 0, 0)["top_logprobs"] == [{names.name(9): -7.0}]
    assert found["text_offset"] == [3, 3 + len(names.name(5))]


def test_offsets_are_of_the_text_whatever_tokens_are_called(
    server: Running, names: TokenNames
) -> None:
    ids = TokenNames(server.service.prompts.tokenizer, as_ids=True)
    entries = [_three(5), _three(9), _three(6)]
    tokens = [5, 9, 6]
    assert ids.legacy(tokens, entries, 1, 0)["tokens"] == ["token_id:5", "token_id:9", "token_id:6"]
    assert (
        ids.legacy(tokens, entries, 1, 4)["text_offset"]
        == names.legacy(tokens, entries, 1, 4)["text_offset"]
    )


def test_prompt_logprobs_are_vllms() -> None:
    assert prompt_logprobs([None, {5: Logprob(float("-inf"), 40, None)}]) == [
        None,
        {"5": {"logprob": LOWEST_LOGPROB, "rank": 40, "decoded_token": None}},
    ]


@pytest.mark.parametrize(
    ("value", "written"), [(-1.25, -1.25), (float("-inf"), -9999.0), (0.0, 0.0), (-1e9, -9999.0)]
)
def test_json_has_no_infinity(value: float, written: float) -> None:
    assert finite(value) == written


@pytest.mark.parametrize("prompt", ["Once upon a time", "Grüße, ☃!"])
def test_a_streams_logprobs_are_those_of_the_whole(server: Running, prompt: str) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "seed": 5, "logprobs": 2, "n": 2,
                            "temperature": 1.5}  # fmt: skip
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).json()
        joined: list[dict[str, list[Any]]] = [{}, {}]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                for name, values in choice["logprobs"].items():
                    joined[choice["index"]].setdefault(name, []).extend(values)
    for choice in answer["choices"]:
        assert joined[choice["index"]] == choice["logprobs"]


def test_an_echos_offsets_point_into_its_text(server: Running) -> None:
    with server.client() as client:
        body = {"prompt": "Once upon a time", "max_tokens": 6, "echo": True, "logprobs": 0}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    pairs = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert pairs[0] == ("<|endoftext|>", 0)  # which the prompt's text doesn't hold
    assert pairs[1] == ("Once", 0)
    assert "".join(name for name, _ in pairs[1:]) == text
    for name, offset in pairs[1:]:
        assert text[offset : offset + len(name)] == name


def test_special_tokens_count_where_the_text_has_them(server: Running) -> None:
    body = {"prompt": "<|im_start|>user", "max_tokens": 1, "echo": True, "logprobs": 0,
            "allowed_token_ids": [2], "skip_special_tokens": False, "ignore_eos": True,
            "return_tokens_as_token_ids": True}  # fmt: skip
    with server.client() as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == "<|im_start|>user<|im_end|>"
        assert choice["logprobs"]["tokens"][:2] == ["token_id:0", "token_id:1"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[:3] == [0, 0, len("<|im_start|>")]
        assert offsets[-1] == len("<|im_start|>user")

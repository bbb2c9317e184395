"""Beam search and best_of over HTTP: the engine's own answers, and what can't go with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from penstock import LLM
from penstock.sampling import BeamSearchParams
from tests.server.conftest import Running

CHAT, WORDS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Tell me of a dog."}]
STORY = "Once upon a time"
LEAST: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, WORDS: {"prompt": STORY}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, path: str, **more: Any) -> dict[str, Any]:
    answer = client.post(path, json={**LEAST[path], **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


SEARCHES: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 30, "stop": ["."], "include_stop_str_in_output": True},
    {"max_tokens": 30, "stop": ["t"], "length_penalty": -2.0, "early_stopping": True},
    {"max_tokens": 30, "stop": ["t"], "length_penalty": 3.0, "early_stopping": "never"},
    {"max_tokens": 10, "temperature": 2.5, "ignore_eos": True, "stop_token_ids": [261]},
    {"max_tokens": 20, "structured_outputs": {"choice": ["a dog", "a doll", "the sea", "no"]}},
    {"max_tokens": 12, "num_beam_groups": 3, "diversity_penalty": 0.7},
]


@pytest.mark.parametrize("more", SEARCHES)
def test_the_best_texts_are_the_engines(
    client: httpx.Client, llm: LLM, more: dict[str, Any]
) -> None:
    answer = post(client, WORDS, use_beam_search=True, n=3, return_token_ids=True, **more)
    (expected,) = llm.beam_search(STORY, BeamSearchParams(beam_width=3, **more))
    count = len(expected.prompt_token_ids)
    assert [(x["index"], x["text"], x["token_ids"]) for x in answer["choices"]] == [
        (i, one.output_text, one.tokens[count:]) for i, one in enumerate(expected.sequences)
    ]
    assert [(x["finish_reason"], x["stop_reason"]) for x in answer["choices"]] == [
        (one.finish_reason, one.stop_reason) for one in expected.sequences
    ]
    made = sum(len(one.tokens) - count for one in expected.sequences)
    assert answer["usage"]["completion_tokens"] == made
    assert answer["usage"]["prompt_tokens"] == count


def test_a_chats_search(client: httpx.Client, llm: LLM) -> None:
    more = {"max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    answer = post(client, CHAT, use_beam_search=True, n=2, return_token_ids=True, **more)
    params = BeamSearchParams(beam_width=2, max_tokens=10, logprobs=2)
    (expected,) = llm.beam_search([answer["prompt_token_ids"]], params)
    for choice, one in zip(answer["choices"], expected.sequences, strict=True):
        assert choice["message"]["content"] == one.output_text
        found = choice["logprobs"]["content"]
        assert [len(x["top_logprobs"]) for x in found] == [2] * len(choice["token_ids"])
        assert sum(x["logprob"] for x in found) == pytest.approx(one.cum_logprob, abs=1e-6)


def test_several_prompts_and_their_echo(client: httpx.Client) -> None:
    prompts = [STORY, "The dog"]
    more = {"use_beam_search": True, "n": 2, "max_tokens": 9}
    both = post(client, WORDS, **more, prompt=prompts, echo=True)["choices"]
    alone = [post(client, WORDS, **more, prompt=prompt)["choices"] for prompt in prompts]
    assert [x["index"] for x in both] == [0, 1, 2, 3]
    assert [x["text"] for x in both] == [
        prompt + x["text"] for prompt, found in zip(prompts, alone, strict=True) for x in found
    ]


def test_one_beam_is_greedy(client: httpx.Client) -> None:
    greedy = post(client, WORDS, temperature=0, max_tokens=12)["choices"][0]["text"]
    assert post(client, WORDS, use_beam_search=True, max_tokens=12)["choices"][0]["text"] == greedy


def test_special_tokens_are_shown_where_they_are_wanted(client: httpx.Client) -> None:
    form = {"guided_grammar": 'start: "yes" <|im_start|> "no"'}
    for skips, text in ((True, "yesno"), (False, "yes<|im_start|>no")):
        more = {"use_beam_search": True, "n": 1, "max_tokens": 12, "skip_special_tokens": skips}
        assert post(client, WORDS, **more, **form)["choices"][0]["text"] == text


def test_what_asks_for_nothing_passes(client: httpx.Client) -> None:
    off: dict[str, Any] = {
        "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "logit_bias": {},
        "seed": None, "min_tokens": 0, "bad_words": [], "repetition_penalty": 1.0,
        "stream": False, "best_of": 1, "guidance_scale": 1.0, "skip_special_tokens": True,
        "token_healing": False,
    }  # fmt: skip
    plain = post(client, WORDS, use_beam_search=True, max_tokens=6)["choices"]
    assert post(client, WORDS, use_beam_search=True, max_tokens=6, **off)["choices"] == plain
    free = {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}
    greedy = {"temperature": 0, "max_tokens": 6}
    assert (
        post(client, WORDS, **greedy, **free)["choices"] == post(client, WORDS, **greedy)["choices"]
    )


BESIDE: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, x) for x in ({"stream": True}, {"top_p": 0.9}, {"prompt_logprobs": 1})),
    *((WORDS, x) for x in (
        {"stream": True}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"seed": 1}, {"seed": 0},
        {"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}}, {"allowed_token_ids": [5]}, {"bad_words": ["dog"]},
        {"min_tokens": 2}, {"best_of": 4}, {"guidance_scale": 2.0}, {"token_healing": True},
        {"mirostat": 2}, {"dry_multiplier": 0.8}, {"xtc_probability": 0.5}, {"typical_p": 0.9},
        {"prompt_logprobs": 0}, {"dynatemp_range": 0.5}, {"top_n_sigma": 1.0},
        {"echo": True, "logprobs": 1}, {"max_tokens": 0, "echo": True},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), BESIDE)
def test_what_a_search_would_ignore_is_refused(
    client: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    body = {**LEAST[path], "use_beam_search": True, "n": 2, **more}
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    field = next(iter(more))
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"]
    assert "use_beam_search" in error["message"]


@pytest.mark.parametrize("path", [CHAT, WORDS])
@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"length_penalty": 2.0}, "length_penalty", "Set use_beam_search"),
        ({"num_beam_groups": 2}, "num_beam_groups", "Set use_beam_search"),
        ({"diversity_penalty": 0.5}, "diversity_penalty", "Set use_beam_search"),
        (
            {"use_beam_search": True, "n": 3, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "num_beam_groups",
            "doesn't divide n (3)",
        ),
        ({"early_stopping": True}, "early_stopping", "Set use_beam_search"),
        ({"use_beam_search": True, "length_penalty": 99}, "length_penalty", "[-10, 10]"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", "'never'"),
        ({"use_beam_search": True, "temperature": -1}, "temperature", "temperature is -1"),
        ({"use_beam_search": True, "n": 1000}, "n", "max_num_seqs"),
        ({"use_beam_search": True, "n": 0}, "n", "at least 1"),
        ({"use_beam_search": 1}, "use_beam_search", "true or false"),
    ],
)
def test_a_search_that_cant_be(
    client: httpx.Client, path: str, more: dict[str, Any], field: str, words: str
) -> None:
    answer = client.post(path, json={**LEAST[path], "max_tokens": 4, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert words in error["message"]


def test_both_are_let_in_by_their_sequences(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    admit = server.service.admit
    monkeypatch.setattr(
        server.service, "admit", lambda *given: asked.append(given[-1]) or admit(*given)
    )
    post(client, WORDS, use_beam_search=True, n=3, max_tokens=2)
    post(client, CHAT, use_beam_search=True, n=2, max_tokens=2)
    post(client, WORDS, best_of=5, n=2, max_tokens=2)
    assert asked == [3, 2, 5]


def test_the_client_that_leaves_ends_its_search(server: Running) -> None:
    with server.client() as client:
        client.timeout = 0.05
        with pytest.raises(httpx.ReadTimeout):
            post(client, WORDS, use_beam_search=True, n=16, max_tokens=500, ignore_eos=True)
    assert server.rest(5)["used_blocks"] == 0


# ── best_of ──────────────────────────────────────────────────────────────────────────────────────


def test_best_of(client: httpx.Client) -> None:
    """Those of all samples whose tokens' log-probabilities have the highest means."""
    options = {"seed": 3, "temperature": 1.5, "max_tokens": 40, "stop": ["."]}
    all_of_them = post(client, WORDS, **options, n=6, logprobs=0)
    means = {
        x["text"]: sum(x["logprobs"]["token_logprobs"]) / len(x["logprobs"]["token_logprobs"])
        for x in all_of_them["choices"]
    }
    assert len(means) == 6
    ranked = sorted(means, key=means.__getitem__, reverse=True)
    answer = post(client, WORDS, **options, n=2, best_of=6)
    assert [(x["index"], x["text"]) for x in answer["choices"]] == list(enumerate(ranked[:2]))
    assert all(x["logprobs"] is None for x in answer["choices"])
    assert answer["usage"] == all_of_them["usage"]
    (one,) = post(client, WORDS, **options, best_of=6, logprobs=1)["choices"]
    assert one["text"] == ranked[0]
    logprobs = one["logprobs"]
    for token, best in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in best  # the chosen one, beside the best where that is another
        assert len(best) <= 2
    prompts = post(client, WORDS, **options, best_of=6, n=2, prompt=[STORY, "The dog"])["choices"]
    assert [x["text"] for x in prompts[:2]] == ranked[:2]
    assert [x["index"] for x in prompts] == [0, 1, 2, 3]


def test_best_of_through_the_client(server: Running) -> None:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as openai:
        answer = openai.completions.create(
            model="stories", prompt=STORY, best_of=4, n=2, max_tokens=5, seed=1
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"best_of": 1, "n": 2}, "n 2"),
        ({"best_of": 3, "stream": True}, "streamed"),
        ({"best_of": 3, "temperature": 0}, "best_of is 3 with temperature 0"),
        ({"best_of": 1000}, "only 64 samples"),
        ({"best_of": 0}, "at least 1"),
    ],
)
def test_best_of_that_cant_be(client: httpx.Client, more: dict[str, Any], words: str) -> None:
    answer = client.post(WORDS, json={**LEAST[WORDS], **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "best_of"), error
    assert words in error["message"]

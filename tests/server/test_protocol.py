"""Every field of the APIs has an effect, or is refused by name."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2 as httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from penstock.server.protocol.chat import ChatRequest
from penstock.server.protocol.common import Body
from penstock.server.protocol.completions import CompletionRequest
from penstock.server.protocol.embeddings import EmbeddingRequest
from penstock.server.protocol.messages import CountTokensRequest, MessagesRequest
from penstock.server.protocol.responses import CompactRequest, InputTokensRequest, ResponsesRequest
from penstock.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.conftest import LENGTH, Running

OPENAI = OpenAI(api_key="none", base_url="http://127.0.0.1:9")
ANTHROPIC = Anthropic(api_key="none", base_url="http://127.0.0.1:9")
CLIENT = httpx.Client(timeout=60)  # one for all: making one takes longer than a request
OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for client in (CLIENT, OPENAI, ANTHROPIC):
        client.close()


METHODS = [
    pytest.param(OPENAI.chat.completions.create, ChatRequest, id="chat.completions"),
    pytest.param(OPENAI.completions.create, CompletionRequest, id="completions"),
    pytest.param(OPENAI.responses.create, ResponsesRequest, id="responses"),
    pytest.param(OPENAI.responses.compact, CompactRequest, id="compact"),
    pytest.param(OPENAI.responses.input_tokens.count, InputTokensRequest, id="input_tokens"),
    pytest.param(OPENAI.embeddings.create, EmbeddingRequest, id="embeddings"),
    pytest.param(ANTHROPIC.messages.create, MessagesRequest, id="messages"),
    pytest.param(ANTHROPIC.messages.count_tokens, CountTokensRequest, id="count_tokens"),
]


@pytest.mark.parametrize(("method", "body"), METHODS)
def test_every_argument_of_the_official_clients_is_known(
    method: Callable[..., Any], body: type[Body]
) -> None:
    arguments = set(inspect.signature(method).parameters) - OF_THE_CLIENT
    assert len(arguments) > 3
    assert arguments - set(body.model_fields) - set(body.unsupported) - set(body.hints) == set()


@dataclass
class Endpoint:
    path: str
    body: type[Body]
    base: dict[str, Any]
    cases: dict[str, Any]  # field → its value, or (value, more fields that both requests have)
    named: set[str] = field(default_factory=set)  # said elsewhere: see their own tests


CHAT = [{"role": "user", "content": "Tell me of a dog. Please!"}]
LONG = [{"role": "user", "content": "A long walk by the sea. " * (LENGTH // 12)},
        {"role": "assistant", "content": "Yes."}] * 2 + CHAT  # fmt: skip
TURNS = [{"role": role, "content": "A walk by the sea. " * (LENGTH // 80)}
         for role in ("user", "assistant", "user", "assistant", "user")]  # fmt: skip
SUMMED_UP = [{"type": "compaction", "compact_threshold": 128}]
SUMMED_UP_TOO = {
    "edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 128}}]
}
TWO = {"allowed_token_ids": [300, 301]}
FEW = {"allowed_token_ids": list(range(260, 340))}  # frequent ones, which come again
SAMPLING: dict[str, Any] = {
    "temperature": 1000.0,
    "top_p": (0.01, {"temperature": 1.5}),
    "top_k": (1, {"temperature": 1.5}),
    "min_p": (0.99, {"temperature": 1.5}),
    "typical_p": (0.05, {"temperature": 1.5}),
    "epsilon_cutoff": (0.9, {"temperature": 1.5}),
    "eta_cutoff": (0.9, {"temperature": 1.5}),
    "top_n_sigma": (0.01, {"temperature": 1.5}),
    "xtc_probability": (1.0, {"temperature": 0.5}),
    "xtc_threshold": (0.0, {"temperature": 1.5, "xtc_probability": 1.0}),
    "dynatemp_range": (5.0, {"temperature": 1.5}),
    "dynatemp_exponent": (0.01, {"temperature": 3.0, "dynatemp_range": 3.0}),
    "mirostat": (2, {"temperature": 100.0}),
    "mirostat_tau": (0.01, {"temperature": 1.5, "mirostat": 2}),
    "mirostat_eta": (1.0, {"temperature": 1.5, "mirostat": 2, "mirostat_tau": 3.0}),
    "dry_multiplier": (5.0, TWO),
    "dry_base": (100.0, {**TWO, "dry_multiplier": 0.1, "dry_allowed_length": 1}),
    "dry_allowed_length": (6, {**TWO, "dry_multiplier": 5.0}),
    "dry_penalty_last_n": (0, {**TWO, "dry_multiplier": 5.0}),
    "dry_sequence_breakers": (list("aeiou "), {**TWO, "dry_multiplier": 5.0}),
    "repetition_penalty": (1.9, FEW),
    "presence_penalty": (2.0, {**FEW, "temperature": 1.5}),
    "frequency_penalty": (2.0, {**FEW, "temperature": 1.5}),
    "logit_bias": {"300": 100},
    "allowed_token_ids": [300, 301],
    "bad_words": ([" dog"], {"logit_bias": {"DOG": 90}}),
    "seed": (12345, {"temperature": 1.5}),
    "stop": ([" "], {}),
    "stop_token_ids": ([300], {"allowed_token_ids": [300]}),
    "min_tokens": (5, {"stop_token_ids": [300], "logit_bias": {"300": 90}}),
    "ignore_eos": (True, {"logit_bias": {"2": 100}}),
    "skip_special_tokens": (False, {"logit_bias": {"1": 100}}),
    "include_stop_str_in_output": (True, {"stop": [" "]}),
    "prompt_logprobs": 1,
    "guidance_scale": 9.0,
    "negative_prompt": ("dog dog dog dog", {"guidance_scale": 5.0}),
}
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
STRUCTURE: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[0-9]+"},
    "guided_json": FLAG,
    "guided_regex": "[0-9]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "yes" | "no"',
    "guided_whitespace_pattern": ("\n\n", {"guided_json": FLAG}),
    "structural_tag": {
        "type": "structural_tag",
        "format": {"type": "const_string", "value": "yes"},
    },
    "guided_decoding_backend": ("xgrammar", {"guided_regex": "[0-9]+"}),
}
BEAMS = {"use_beam_search": True, "n": 4, "seed": None, "max_tokens": 24, "stop": ["t"]}
SEARCH: dict[str, Any] = {
    "use_beam_search": (True, {"n": 2, "seed": None, "temperature": 1.5, "max_tokens": 24}),
    "length_penalty": (-5.0, BEAMS),
    "early_stopping": (True, BEAMS),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": None}}]
OLDER = [{"name": "f"}]
INPUTS = [{"name": "f", "input_schema": {"type": "object"}}]
FLAT = [{"type": "function", "name": "f"}]
SAID_IN_THE_LOG = {"user", "safety_identifier"}  # test_user_is_in_the_log
ASKS_FOR_NOTHING = {"prompt_cache_key"}  # as docs/compatibility.md says
GROUPS = {"num_beam_groups", "diversity_penalty"}  # neither without the other: search requests
OF_THE_QUEUE = {"priority", "ttft_slo_ms", "tpot_slo_ms"}  # reach the engine: test below
OF_THE_CACHE = {"cache_salt", "cache_control", "kv_transfer_params"}
"""Tests below, the clients' tests, and test_transfer.py."""

TEMPLATE: dict[str, Any] = {
    "messages": CHAT + CHAT,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "chat_template": "{{ messages[0]['content'] }}",
    "chat_template_kwargs": {"more": "X"},
    "documents": [{"title": "x"}],
}

ENDPOINTS = {
    "chat": Endpoint(
        "/v1/chat/completions",
        ChatRequest,
        {"messages": CHAT, "max_tokens": 8, "seed": 1},
        {
            **SAMPLING,
            **TEMPLATE,
            "model": "another",
            "max_tokens": 3,
            "max_completion_tokens": 7,
            "n": (2, {"temperature": 1.0}),
            **STRUCTURE,
            **SEARCH,
            "stream": True,
            "stream_options": ({"include_usage": True}, {"stream": True}),
            "logprobs": True,
            "top_logprobs": (2, {"logprobs": True}),
            "truncation": ("auto", {"messages": LONG}),
            "context_management": (SUMMED_UP, {"messages": TURNS}),
            "prediction": {"type": "content", "content": "Once"},
            "truncate_prompt_tokens": 3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": (True, {"logprobs": True}),
            "echo": True,
            "request_id": "chosen",
            "reasoning_effort": "low",
            "thinking_token_budget": 0,
            "tools": TOOLS,
            "tool_choice": ("none", {"tools": TOOLS}),
            "functions": OLDER,
            "function_call": ("none", {"functions": OLDER}),
        },
        SAID_IN_THE_LOG
        | ASKS_FOR_NOTHING
        | OF_THE_QUEUE
        | GROUPS
        | {
            "cache_salt",
            "kv_transfer_params",
            "metadata",
            "include_reasoning",
            "parallel_tool_calls",
        },  # the latter two: tools/test_chat.py
    ),
    "completions": Endpoint(
        "/v1/completions",
        CompletionRequest,
        {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1},
        {
            **SAMPLING,
            "model": "another",
            "prompt": "Once",
            "max_tokens": 3,
            "n": (2, {"temperature": 1.0}),
            **STRUCTURE,
            **SEARCH,
            "best_of": (5, {"temperature": 1.5}),
            "stream": True,
            "stream_options": ({"include_usage": True}, {"stream": True}),
            "logprobs": 1,
            "echo": True,
            "token_healing": (True, {"prompt": "Once upon a ti"}),
            "add_special_tokens": False,
            "truncate_prompt_tokens": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": (True, {"logprobs": 0}),
            "request_id": "chosen",
        },
        SAID_IN_THE_LOG
        | ASKS_FOR_NOTHING
        | OF_THE_QUEUE
        | GROUPS
        | {"cache_salt", "kv_transfer_params"},
    ),
    "responses": Endpoint(
        "/v1/responses",
        ResponsesRequest,
        {"input": "Tell me of a dog.", "max_output_tokens": 8, "seed": 1},
        {
            **SAMPLING,
            "model": "another",
            "input": "A cat?",
            "instructions": "Be brief.",
            "max_output_tokens": 3,
            "stream": True,
            "metadata": {"a": "b"},
            "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"},
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "truncation": ("auto", {"input": LONG}),
            "context_management": (SUMMED_UP, {"input": TURNS}),
            "store": False,
            "previous_response_id": "resp_x",
            "chat_template_kwargs": {"more": "X"},
            "tools": FLAT,
            "tool_choice": ("none", {"tools": FLAT}),
            "parallel_tool_calls": False,
        },
        SAID_IN_THE_LOG
        | ASKS_FOR_NOTHING
        | OF_THE_QUEUE
        | {"cache_salt", "client_metadata", "kv_transfer_params"},
    ),
    "compact": Endpoint(
        "/v1/responses/compact",
        CompactRequest,
        {"input": TURNS},
        {
            "model": "another",
            "input": TURNS[2:],
            "instructions": "Be brief.",
            "previous_response_id": "resp_x",
            "chat_template_kwargs": {"more": "X"},
        },
        ASKS_FOR_NOTHING | OF_THE_QUEUE | {"cache_salt", "kv_transfer_params"},
    ),
    "input_tokens": Endpoint(
        "/v1/responses/input_tokens",
        InputTokensRequest,
        {"input": "Tell me of a dog."},
        {
            "model": "another",
            "input": "A cat?",
            "instructions": "Be brief.",
            "previous_response_id": "resp_x",
            "chat_template_kwargs": {"more": "X"},
            "tools": FLAT,
            "tool_choice": ("none", {"tools": FLAT}),
        },
        # these decide on the answer, not on its prompt, with this template
        {"text", "reasoning", "truncation", "parallel_tool_calls"},
    ),
    "embeddings": Endpoint(
        "/v1/embeddings",
        EmbeddingRequest,
        {"input": "a little dog"},
        {
            "model": "another",
            "input": "a cat",
            "encoding_format": "base64",
            "dimensions": 8,
            "pooling_type": "mean",
            "normalize": False,
            "truncate_prompt_tokens": 2,
            "add_special_tokens": (False, {"pooling_type": "mean"}),
            "tpot_slo_ms": 5.0,
            "kv_transfer_params": {"do_remote_decode": True},
        },
        SAID_IN_THE_LOG | ASKS_FOR_NOTHING | OF_THE_QUEUE | {"cache_salt", "request_id"},
    ),
    "messages": Endpoint(
        "/v1/messages",
        MessagesRequest,
        {"model": "stories", "messages": CHAT, "max_tokens": 8, "temperature": 0},
        {
            "model": "another",
            "messages": CHAT + CHAT,
            "max_tokens": 3,
            "stream": True,
            "temperature": -1.0,
            "top_p": (0.01, {"temperature": 1000.0}),
            "top_k": (1, {"temperature": 1000.0}),
            "stop_sequences": [" "],
            "system": "Be brief.",
            "tools": INPUTS,
            "tool_choice": ({"type": "none"}, {"tools": INPUTS}),
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            "output_format": {"type": "json_object"},
            "context_management": (SUMMED_UP_TOO, {"messages": TURNS}),
            "thinking": {"type": "adaptive"},
            "chat_template_kwargs": {"more": "X"},
        },
        {"metadata"} | OF_THE_QUEUE | OF_THE_CACHE,
    ),
    "count_tokens": Endpoint(
        "/v1/messages/count_tokens",
        CountTokensRequest,
        {"model": "stories", "messages": CHAT},
        {
            "model": "another",
            "messages": CHAT + CHAT,
            "system": "Be brief.",
            "tools": INPUTS,
            "tool_choice": ({"type": "none"}, {"tools": INPUTS}),
            "context_management": (SUMMED_UP_TOO, {"messages": TURNS}),
            "thinking": {"type": "adaptive"},
            "chat_template_kwargs": {"more": "X"},
        },
        # these ask for nothing here, as in Anthropic's API
        {"cache_control", "output_config", "output_format"},
    ),
    "tokenize": Endpoint(
        "/tokenize",
        TokenizeRequest,
        {"messages": CHAT},
        {
            **TEMPLATE,
            "model": "another",
            "prompt": "Once",
            "add_special_tokens": True,
            "return_token_strs": True,
        },
    ),
    "detokenize": Endpoint(
        "/detokenize",
        DetokenizeRequest,
        {"tokens": [300, 301]},
        {"model": "another", "tokens": [300]},
    ),
}

# The embedded model's template knows no documents; this one writes everything it is given.
WRITES_ALL = (
    "{{ bos_token }}{{ documents }}{{ more }}{{ reasoning_effort }}{{ thinking }}"
    "{% for m in messages %}<|im_start|>{{ m }}{% endfor %}"
)
TOLD = {
    "documents", "chat_template_kwargs", "reasoning_effort", "thinking", "thinking_token_budget",
}  # fmt: skip
# Fields whose cases are refusals, and what these name.
REFUSED = {
    "kv_transfer_params": "kv_transfer_params",
    "model": "isn't served",
    "chat_template": "--trust-request-chat-template",
    "echo": "echo",
    "guided_decoding_backend": "llguidance",
    "prediction": "there are no drafts here",  # test_expected_answers: where there are some
    "prompt_logprobs": "prompt_logprobs",
    "previous_response_id": "Previous response with id 'resp_x' not found.",
    "tpot_slo_ms": "tpot_slo_ms",
    "temperature": "temperature",  # below 0
}
CASES = [
    pytest.param(endpoint, name, id=f"{key}-{name}")
    for key, endpoint in ENDPOINTS.items()
    for name in endpoint.cases
]


def _post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """(status, the answer without ids and times)."""
    dog = server.service.prompts.tokenizer.encode(" dog", add_special_tokens=False)[0]
    text = json.dumps(body).replace('"DOG"', f'"{dog}"')
    answer = CLIENT.post(
        server.url + path, content=text, headers={"content-type": "application/json"}
    )
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, _settled(answer.text)
    said = json.loads(_settled(answer.text))
    usage = said.get("usage", {}) if path == "/v1/messages" else {}
    for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):  # not those computed
        if name in usage:
            usage["input_tokens"] += usage.pop(name)
    return answer.status_code, said


def _settled(text: str) -> str:
    for pattern, put in (
        (r'"penstock": ?\{(?:[^{}]|\{[^{}]*\})*\}', '"penstock": 0'),
        (r'"created(_at)?": ?\d+', '"created": 0'),
        (r"-[0-9a-f]{32}-[0-9a-f]{16}", "-id"),
        (r"_[0-9a-f]{32}-[0-9a-f]{16}", "_id"),
        (r'"cached_tokens": ?\d+', '"cached_tokens": 0'),
    ):
        text = re.sub(pattern, put, text)
    return text


@pytest.mark.parametrize(("endpoint", "name"), CASES)
def test_a_field_changes_the_answer_or_is_refused(
    server: Running, endpoint: Endpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = endpoint.cases[name]
    value, beside = case if isinstance(case, tuple) else (case, {})
    if name in TOLD:
        config = replace(server.service.config, chat_template=WRITES_ALL)
        monkeypatch.setattr(server.service, "config", config)
    base = {**endpoint.base, **beside}
    if name == "max_completion_tokens":
        del base["max_tokens"]
    if name == "prompt":
        base.pop("messages", None)
    without = {k: v for k, v in base.items() if k != name or k in endpoint.base}
    usual = _post(server, endpoint.path, without) if name != "prompt" else (200, None)
    changed = _post(server, endpoint.path, {**base, name: value})
    assert usual[0] == 200 or name in ("truncation",), usual
    if changed[0] != 200:
        assert changed[0] in (400, 404)
        said = json.dumps(changed[1])
        assert REFUSED.get(name, name) in said
        if name not in REFUSED:
            pytest.fail(f"refused: {said}")
    assert changed != usual


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_the_table_has_every_field(endpoint: Endpoint) -> None:
    fields = set(endpoint.body.model_fields)
    assert set(endpoint.cases) | (endpoint.named & fields) == fields


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_what_isnt_supported_is_refused_by_name(server: Running, endpoint: Endpoint) -> None:
    with server.client() as client:
        for name, harmless in endpoint.body.unsupported.items():
            answer = client.post(endpoint.path, json={**endpoint.base, name: {"x": 1}})
            assert answer.status_code == 400, name
            assert name in answer.json()["error"]["message"]
            assert "isn't supported" in answer.json()["error"]["message"]
            for value in (*harmless, None):
                with_it = endpoint.body.model_validate({**endpoint.base, name: value})
                assert with_it == endpoint.body.model_validate(endpoint.base)
        answer = client.post(endpoint.path, json={**endpoint.base, "tempreture": 1})
        assert answer.status_code == 400
        assert "'tempreture' isn't a field" in answer.json()["error"]["message"]


QUEUED = {k: e for k, e in ENDPOINTS.items() if "priority" in e.body.model_fields}


@pytest.mark.parametrize("endpoint", QUEUED.values(), ids=QUEUED)
def test_options_reach_the_engine(
    server: Running, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    options = server.service.options
    # What the server's policy would refuse: whether it does is the engine's matter.
    monkeypatch.setattr(server.llm.engine.scheduler, "check", lambda n, options: None)
    monkeypatch.setattr(
        server.service, "options", lambda *given: seen.append(options(*given)) or seen[-1]
    )
    slos = {"ttft_slo_ms": 250.0}
    if "tpot_slo_ms" not in endpoint.body.unsupported:
        slos["tpot_slo_ms"] = 40.0
    asked = {**endpoint.base, "priority": -3, "cache_salt": f"salt {endpoint.path}", **slos}
    status, said = _post(server, endpoint.path, asked)
    assert status == 200, said
    (chosen,) = seen
    assert chosen.priority == -3
    assert chosen.ttft_slo_s == 0.25
    assert chosen.tpot_slo_s == (0.04 if "tpot_slo_ms" in slos else None)
    assert chosen.cache_salt == f"salt {endpoint.path}"


@pytest.mark.parametrize("key", ["chat", "completions", "responses", "embeddings", "messages"])
def test_user_is_in_the_log(server: Running, key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.server")
    endpoint = ENDPOINTS[key]
    fields = [name for name in ("user", "safety_identifier") if name in endpoint.body.model_fields]
    asked = [{name: "u-1"} for name in fields] or [{"metadata": {"user_id": "u-1"}}]
    for more in asked:
        caplog.clear()
        assert _post(server, endpoint.path, {**endpoint.base, **more})[0] == 200
        server.rest()
        assert [r.fields["user"] for r in caplog.records if hasattr(r, "fields")] == ["u-1"]

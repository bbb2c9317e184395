"""What is refused names the field that was sent, says what it must be, and gives advice that helps.

Asked over real connections; each case is (path, what is sent beside the endpoint's least, the
field to blame, a text of the message).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from penstock.server.protocol.common import STRICT
from tests.server.conftest import LENGTH, Running

WRAPPED = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}'
FLAT = '{"type": "json_schema", "name": "answer", "schema": {…}}'
CHAT, WORDS, ANSWER, VECTOR, MESSAGE, COUNT = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages",
    "/v1/messages/count_tokens",
)  # fmt: skip
ASK = [{"role": "user", "content": "Hi"}]
LONG = "dog and cat " * LENGTH
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 1},
    WORDS: {"prompt": "Hi", "max_tokens": 1},
    ANSWER: {"input": "Hi", "max_output_tokens": 1},
    VECTOR: {"input": "Hi"},
    MESSAGE: {"model": "stories", "messages": ASK, "max_tokens": 1},
    COUNT: {"model": "stories", "messages": ASK},
    "/tokenize": {"messages": ASK},
    "/detokenize": {"tokens": [5]},
}


def ask(server: Running, path: str, more: dict[str, Any]) -> httpx.Response:
    body = {name: value for name, value in (LEAST[path] | more).items() if value is not ...}
    with server.client() as client:
        return client.post(path, json=body)


def refused(answer: httpx.Response, path: str) -> tuple[str | None, str, str | None]:
    """(param, message, code); Anthropic's errors have the param before the message."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path not in (MESSAGE, COUNT):
        return error["param"], error["message"], error["code"]
    param, _, message = error["message"].partition(": ")
    return param, message, None


def part(content: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [content]}]}


def called(**function: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    return {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}


CALLED = {"type": "function_call", "call_id": "1", "name": "f"}
NAMED = [
    # The field that was sent, not its other name; not what the engine calls it.
    (CHAT, {"max_tokens": LENGTH}, "max_tokens", f"max_tokens is {LENGTH:,}"),
    (CHAT, {"max_tokens": ..., "max_completion_tokens": LENGTH},
     "max_completion_tokens", f"is {LENGTH:,}"),
    (CHAT, {"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
    (CHAT, {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens is 3 but max_tokens is 2"),
    (ANSWER, {"min_tokens": 3}, "min_tokens", "but max_output_tokens is 1"),
    (ANSWER, {"max_output_tokens": LENGTH}, "max_output_tokens",
     f"max_output_tokens is {LENGTH:,}"),
    (MESSAGE, {"stop_sequences": [""]}, "stop_sequences", "stop_sequences[0] is an empty"),
    (CHAT, {"stop": ["a", ""]}, "stop", "stop[1] is an empty"),
    (CHAT, {"ttft_slo_ms": 100}, "ttft_slo_ms", "ttft_slo_ms is 100, but"),
    (CHAT, {"tpot_slo_ms": 0.5}, "tpot_slo_ms", "--scheduling-policy edf"),
    (CHAT, {"ttft_slo_ms": -1}, "ttft_slo_ms", "must be above 0"),
    (CHAT, {"priority": 3}, "priority", "--scheduling-policy priority"),
    (CHAT, {"priority": 1 << 40}, "priority", "32 bits"),
    (CHAT, {"cache_salt": ""}, "cache_salt", "cache_salt is empty"),
    (CHAT, {"temperature": -1}, "temperature", "temperature is -1"),
    (CHAT, {"top_p": 2}, "top_p", "top_p is 2"),
    (CHAT, {"seed": 2**64}, "seed", "seed is 18446744073709551616; it must be in [-92"),
    (WORDS, {"seed": -(2**63) - 1}, "seed", "seed is -9223372036854775809"),
    (CHAT, {"top_k": -2}, "top_k", "top_k is -2"),
    (CHAT, {"min_p": 2}, "min_p", "min_p is 2"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
    (CHAT, {"logit_bias": {"5": 1000}}, "logit_bias", "logit_bias[5] is 1000"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "Use null"),
    (CHAT, {"n": 2, "temperature": 0}, "n", "identical"),
    # what would be work for the engine, and so for everybody
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", "must be at least 0"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "must be at most 20"),
    (CHAT, {"dry_multiplier": 1, "dry_sequence_breakers": [f"a{i}" for i in range(2000)]},
     "dry_sequence_breakers", "has 2,000 strings; at most"),
    (CHAT, {"dry_multiplier": 1, "dry_sequence_breakers": ["a" * 10_001]},
     "dry_sequence_breakers", "has 10,001 characters; at most 10,000"),
    (CHAT, {"dry_multiplier": 1, "dry_allowed_length": 3_000_000_000}, "dry_allowed_length",
     "dry_allowed_length is 3000000000"),
    (MESSAGE, {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a",
         "cache_control": {"type": "ephemeral", "ttl": "1" * 5000 + "m"}}
    ]}]}, "cache_control.ttl", "write a number and s, m or h"),
    (MESSAGE, {"messages": [*ASK, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "a", "cache_control": {"type": "ephemeral"}}]}]},
     "messages[1].content[0]", "can't stand on reasoning"),
    (MESSAGE, {"top_p": 2}, "top_p", "top_p is 2"),
    (VECTOR, {"dimensions": 10**6}, "dimensions", "dimensions=1000000"),
    (VECTOR, {"input": []}, "input", "no prompt"),
    (VECTOR, {"input": ""}, "input", "empty"),
    # Prompts that are too long, with what the endpoint has against that.
    (WORDS, {"prompt": LONG}, "prompt", "truncate_prompt_tokens: -1"),
    (VECTOR, {"input": LONG}, "input", "truncate_prompt_tokens: -1"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", 'truncation: "auto"'),
    (ANSWER, {"input": LONG}, "input", 'truncation: "auto"'),
    (MESSAGE, {"messages": [{"role": "user", "content": LONG}]}, "messages", "--truncation auto"),
    # Where in the body.
    (CHAT, {"messages": [{**ASK[0], "audio": {"id": 1}}]}, "messages[0].audio", "isn't supported"),
    (CHAT, {"messages": [*ASK, {**ASK[0], "x": 1}]}, "messages[1].x", "isn't a field"),
    (CHAT, {"messages": [{"role": "nobody"}]}, "messages[0].role", "is 'nobody'; it must be 'sys"),
    (CHAT, part({"type": "text", "text": "a", "citations": [1]}),
     "messages[0].content[0].citations", "isn't supported"),
    (CHAT, part({"type": "text"}), "messages[0].content[0]", "has no text"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "isn't supported"),
    (ANSWER, {"input": [CALLED | {"arguments": '{"a": '}]}, "input[0].arguments", "JSON object"),
    (ANSWER, {"input": [ASK[0], CALLED | {"arguments": "[1]"}]}, "input[1].arguments", "not '[1]'"),
    (CHAT, called(arguments="[]"), "messages[1].tool_calls[0].function.arguments", "JSON object"),
    (ANSWER, {"input": [{**ASK[0], "phase": "x"}]}, "input[0].phase", "isn't supported"),
    (ANSWER, {"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a schema"),
    (ANSWER, {"text": {"format": {"type": "object", "properties": {}}}}, "text.format", FLAT),
    (ANSWER, {"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
     "text.format", FLAT),
    (CHAT, {"response_format": {"type": "object", "properties": {}}}, "response_format", WRAPPED),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
     "response_format", WRAPPED),
    (CHAT, {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
     "response_format", WRAPPED),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", WRAPPED),
    (MESSAGE, {"output_format": {"anyOf": [{}]}}, "output_format", FLAT),
    (MESSAGE, {"tool_choice": "auto"}, "tool_choice", '\'auto\' isn\'t a choice; send {"type": '),
    (MESSAGE, {"tool_choice": {"type": "required"}}, "tool_choice", '"tool", "name": …}'),
    (ANSWER, {"text": {"format": {"type": "text", "schema": {}}}}, "text.format", "has no schema"),
    (ANSWER, {"text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
     "text.format", "can't be followed at #/type"),
    (MESSAGE, {"output_format": {"type": "json_object"},
               "output_config": {"format": {"type": "json_object"}}}, "output_format", "both say"),
    (MESSAGE, {"output_config": {"effort": "lots"}}, "output_config.effort", "'none'"),
    (ANSWER, {"reasoning": {"effort": 3}}, "reasoning.effort", "must be"),
    (ANSWER, {"include": ["file_search_call.results"]}, "include", "'file_search_call.results'"),
    # In words.
    (CHAT, {"messages": None}, "messages", "messages is null; it must be a list."),
    (ANSWER, {"input": 5}, "input", "input is 5; it must be a text or a list."),
    (CHAT, {"messages": []}, "messages", "messages has 0 entries; at least 1 is needed."),
    (CHAT, {"messages": ["x"]}, "messages[0]", "messages[0] is 'x'; it must be an object."),
    (CHAT, {"messages": [None]}, "messages[0]", "messages[0] is null; it must be an object."),
    (CHAT, {"n": True}, "n", "n is true; it must be an integer."),
    (CHAT, {"stream": "yes"}, "stream", "stream is 'yes'; it must be true or false."),
    (CHAT, {"temperature": [1]}, "temperature", "temperature is a list; it must be a number."),
    (CHAT, {"top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be at most 20."),
    (VECTOR, {"encoding_format": "x"}, "encoding_format", "it must be 'float' or 'base64'."),
    # More than there can be use for.
    (CHAT, {"messages": ASK * 16_385}, "messages", "16,385 entries; at most 16,384 are read."),
    (MESSAGE, {"messages": ASK * 16_385}, "messages", "16,385 entries; at most 16,384 are read."),
    (ANSWER, {"input": ASK * 16_385}, "input", "16,385 entries; at most 16,384 are read."),
    (CHAT, {"cache_salt": "s" * 513}, "cache_salt", "513 characters; at most 512 are read."),
    (CHAT, {"user": "u" * 4097}, "user", "4,097 characters; at most 4,096 are read."),
    (MESSAGE, {"metadata": {"user_id": "u" * 4097}}, "metadata.user_id", "at most 4,096"),
    ("/detokenize", {"tokens": [5] * 131_073}, "tokens", "131,073 ids; at most 131,072 are read."),
    # What would be ignored.
    ("/tokenize", {"messages": ..., "prompt": "a", "add_generation_prompt": False},
     "add_generation_prompt", "for messages"),
    ("/tokenize", {"messages": ..., "prompt": "a", "chat_template_kwargs": {"a": 1}},
     "chat_template_kwargs", "for messages"),
    ("/tokenize", {"messages": ..., "prompt": "a", "continue_final_message": True},
     "continue_final_message", "for messages"),
    (CHAT, {"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs", "'tone'"),
    (ANSWER, {"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs", "'tone'"),
    (CHAT, {"documents": [{"text": "a"}]}, "documents", "reads no documents"),
    (CHAT, called() | {"continue_final_message": True}, "continue_final_message", "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "param", "said"), NAMED)
def test_the_field_that_was_sent_is_named(
    server: Running, path: str, more: dict[str, Any], param: str, said: str
) -> None:
    found, message, _ = refused(ask(server, path, more), path)
    assert found == param
    assert said in message
    for word in ("Input should", "NoneType", "slo_s", "valid dictionary", "instance of"):
        assert word not in message


KINDS = [
    *((CHAT, part({"type": kind, kind: {}}), "messages[0].content", kind)
      for kind in ("video_url", "input_audio", "file", "refusal", "tool_use")),
    *((path, part({"type": kind, "source": {}, "content": []}), "messages[0].content", kind)
      for kind in ("document", "search_result", "server_tool_use")
      for path in (MESSAGE, COUNT)),
    *((ANSWER, {"input": [*ASK, {"type": kind, "call_id": "a", "name": "b", "output": "c"}]},
       "input", kind) for kind in ("custom_tool_call", "web_search_call", "computer_call_output")),
    (ANSWER, {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
     "input[0].content", "refusal"),
    (ANSWER, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
     "input[0].content", "input_file"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "param", "kind"), KINDS)
def test_kinds_that_arent_supported_are_named(
    server: Running, path: str, more: dict[str, Any], param: str, kind: str
) -> None:
    found, message, code = refused(ask(server, path, more), path)
    assert found == param
    assert repr(kind) in message
    assert "isn't supported" in message
    assert "isn't a field" not in message
    assert code in ("unsupported_parameter", None)


@pytest.mark.parametrize("empty", [{}, "", [], False])
@pytest.mark.parametrize("name", sorted(STRICT))
def test_an_empty_schema_asks_for_something(server: Running, name: str, empty: object) -> None:
    for path, field, more in (
        (CHAT, name, {name: empty}),
        (WORDS, name, {name: empty}),
        (MESSAGE, name, {name: empty}),
        (ANSWER, f"text.{name}", {"text": {name: empty}}),
    ):
        answer = ask(server, path, more)
        if (name, empty) == ("guided_json", {}) and path in (CHAT, WORDS):
            assert answer.status_code == 200  # the schema that takes any JSON
            continue
        param, message, _ = refused(answer, path)
        assert param is not None
        assert param.startswith(field)
        assert field in message
    if name not in ("format", "output_format"):
        assert ask(server, CHAT, {name: None}).status_code == 200


NULLS = {
    CHAT: ("add_generation_prompt", "continue_final_message", "add_special_tokens", "stream", "n",
           "stream_options", "truncation", "tools", "documents", "chat_template_kwargs"),
    WORDS: ("add_special_tokens", "echo", "stop", "suffix", "logprobs"),
    VECTOR: ("encoding_format", "add_special_tokens", "normalize", "dimensions", "pooling_type"),
    "/tokenize": ("add_generation_prompt", "add_special_tokens", "return_token_strs", "prompt"),
}  # fmt: skip


@pytest.mark.parametrize("path", NULLS)
def test_null_says_nothing(server: Running, path: str) -> None:
    greedy = {"temperature": 0} if path in (CHAT, WORDS) else {}
    usual = ask(server, path, greedy).json()
    for name in NULLS[path]:
        answer = ask(server, path, {**greedy, name: None})
        assert answer.status_code == 200, (name, answer.text)
        for what in ("tokens", "data"):
            assert answer.json().get(what) == usual.get(what), name


def test_null_within(server: Running) -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": "{}"}}
    said = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}]
    stream = {"include_usage": None, "continuous_usage_stats": None}
    more = {"messages": said, "stream": True, "stream_options": stream}
    assert ask(server, CHAT, more).status_code == 200
    marked = [{**ASK[0], "cache_control": {"type": None, "ttl": None}}]
    assert ask(server, CHAT, {"messages": marked}).status_code == 200
    assert ask(server, ANSWER, {"input": [{**ASK[0], "type": None}]}).status_code == 200
    going_on = {"continue_final_message": True, "add_generation_prompt": None}
    assert ask(server, CHAT, going_on).status_code == 200
    unknown = {**ASK[0], "reasoning": None, "thinking_blocks": None}
    assert ask(server, CHAT, {"messages": [unknown], "nobody_knows": None}).status_code == 200
    assert ask(server, CHAT, {"nobody_knows": 0}).status_code == 400


def test_an_answers_own_settings_can_be_sent_back(server: Running) -> None:
    with server.client() as client:
        least = LEAST[ANSWER]
        answer = client.post(ANSWER, json=least).json()
        of_the_answer = {"id", "object", "created_at", "status", "error", "incomplete_details",
                         "output", "usage", "penstock"}  # fmt: skip
        settings = {k: v for k, v in answer.items() if k not in of_the_answer}
        again = client.post(ANSWER, json=settings | least)
    assert again.status_code == 200, again.text
    assert ask(server, ANSWER, {"reasoning": {"effort": "none"}}).status_code == 200


def test_what_clients_send_to_any_model_is_harmless(server: Running) -> None:
    for given in ({"enable_thinking": False}, {"thinking": True}, {"tone": None}, {}):
        assert ask(server, CHAT, {"chat_template_kwargs": given}).status_code == 200
    assert ask(server, CHAT, {"documents": []}).status_code == 200
    nothing: dict[str, Any] = {"documents": [], "chat_template_kwargs": {}}
    plain = {"messages": ..., "prompt": "a"}
    assert ask(server, "/tokenize", plain | nothing).status_code == 200


def test_an_empty_template_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(server.service.config, trust_request_chat_template=True)
    monkeypatch.setattr(server.service, "config", config)
    for path in (CHAT, "/tokenize"):
        param, message, _ = refused(ask(server, path, {"chat_template": ""}), path)
        assert (param, "empty" in message) == ("chat_template", True)
    assert ask(server, CHAT, {"chat_template": "{{ messages }}"}).status_code == 200
    broken = ask(server, CHAT, {"chat_template": "{% if", "chat_template_kwargs": {"a": 1}})
    assert broken.status_code == 400
    assert broken.json()["error"]["code"] == "chat_template_error"


def test_a_prompt_for_an_embedding_fills_the_model(server: Running) -> None:
    """Nothing is generated, so that no room is kept for it."""
    most = server.llm.engine.max_model_len
    whole = ask(server, VECTOR, {"input": [5] * most})
    assert whole.json()["usage"]["prompt_tokens"] == most
    param, message, code = refused(ask(server, VECTOR, {"input": [5] * (most + 1)}), VECTOR)
    assert (param, code) == ("input", "context_length_exceeded")
    assert "to generate" not in message
    cut = ask(server, VECTOR, {"input": [6, *[5] * most], "truncate_prompt_tokens": -1})
    assert cut.json()["data"] == whole.json()["data"]
    assert refused(ask(server, WORDS, {"prompt": [5] * most}), WORDS)[0] == "prompt"

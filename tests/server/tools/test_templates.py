"""What chat templates of each family write, read again; and which family a template is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server.tools import forms
from penstock.server.tools.events import Call
from penstock.server.tools.families import TOOL_PARSERS, family_of, tags_of
from penstock.tokenizer.chat import render_chat
from penstock.tokenizer.tool_calls import tool_call_form

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
PEERS, LATER, VLLM = "llama.cpp-2025-02", "ik_llama.cpp-2026-08", "vllm-examples"

# template → (family, form of its arguments, whether it thinks, whether a turn has several calls)
TEMPLATES: dict[str, tuple[str, str, bool, bool]] = {
    f"{PEERS}/Qwen-Qwen2.5-7B-Instruct": ("hermes", "json", False, True),
    f"{PEERS}/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "json", False, True),
    f"{LATER}/Qwen-Qwen3-0.6B": ("hermes", "json", True, True),
    f"{VLLM}/tool_chat_template_hermes": ("hermes", "json", False, True),
    f"{LATER}/Qwen3-Coder": ("qwen3_coder", "xml", False, True),
    f"{LATER}/Qwen3.5-4B": ("qwen3_coder", "xml", True, True),
    f"{LATER}/StepFun3.5-Flash": ("qwen3_coder", "xml", True, True),
    f"{PEERS}/meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", "json", False, False),
    f"{PEERS}/meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", "json", False, False),
    f"{PEERS}/meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", "json", False, False),
    f"{VLLM}/tool_chat_template_llama3.2_pythonic": ("pythonic", "python", False, True),
    f"{VLLM}/tool_chat_template_llama4_pythonic": ("pythonic", "python", False, True),
    f"{VLLM}/tool_chat_template_toolace": ("pythonic", "python", False, True),
    f"{PEERS}/mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "json", False, True),
    f"{VLLM}/tool_chat_template_mistral3": ("mistral", "json", False, True),
    "mistral/v3": ("mistral", "json", False, True),
    "mistral/v7": ("mistral", "json", False, True),
    "mistral/v11": ("mistral", "json", False, True),
    "mistral/v13": ("mistral", "json", False, True),
    "mistral/v15_think": ("mistral", "json", True, True),
    f"{PEERS}/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "json", True, True),
    f"{VLLM}/tool_chat_template_deepseekv3": ("deepseek_v3", "json", False, True),
    f"{LATER}/deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "json", True, True),
    f"{LATER}/google-gemma-4-31B-it": ("gemma4", "gemma", True, True),
    f"{LATER}/google-gemma-4-31B-it-interleaved": ("gemma4", "gemma", True, True),
    f"{LATER}/openai-gpt-oss-120b": ("openai", "json", False, False),
    # Others' forms, which aren't read, and templates that know no tools.
    f"{LATER}/GLM-4.6": ("", "", True, False),
    f"{LATER}/Kimi-K2-Instruct": ("", "", False, False),
    f"{LATER}/unsloth-Apriel-1.5": ("", "", False, False),
    f"{LATER}/ibm-granite-granite-3.3-2B-Instruct": ("", "", False, False),
    f"{PEERS}/fireworks-ai-llama-3-firefunction-v2": ("", "", False, False),
    f"{PEERS}/meetkai-functionary-medium-v3.1": ("", "", False, False),
    f"{PEERS}/microsoft-Phi-3.5-mini-instruct": ("", "", False, False),
    f"{VLLM}/template_chatml": ("", "", False, False),
}
# Pythonic ones write texts without quotes; these two write &#34; for quotes, in transformers too.
_ESCAPING = ("mistral/v3", "mistral/v7")
_WRITING = [
    name
    for name, (family, *_) in TEMPLATES.items()
    if family not in ("", "pythonic") and name not in _ESCAPING
]


def template(name: str) -> str:
    path = DATA / "templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"the shared data has no {path.name}")
    return path.read_text()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_family_is_told_by_the_template(name: str) -> None:
    family, arguments, thinks, _ = TEMPLATES[name]
    source = template(name)
    found = family_of(source)
    assert ("" if found is None else found.name) == family
    assert (tags_of(source) is not None) == thinks
    if found is not None:
        assert found.form.arguments == arguments
        assert TOOL_PARSERS[found.name].reader is found.reader


def written(source: str, calls: list[tuple[str, Any]]) -> str:
    """The assistant's turn with these calls, as a template writes it."""
    form = tool_call_form(source)
    listed = []
    for i, (name, arguments) in enumerate(calls):
        given = json.dumps(arguments) if form.arguments_as_text else arguments
        function = {"name": name, "arguments": given}
        listed.append({"id": f"call0000{i}", "type": "function", "function": function})
    question = {"role": "user", "content": "question"}
    answer: dict[str, Any] = {"role": "assistant", "content": form.content, "tool_calls": listed}
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "add_generation_prompt": False,
        "variables": dict.fromkeys(("bos_token", "eos_token"), ""),
    }
    before = render_chat(source, [question], **options)
    after = render_chat(source, [question, answer], **options)
    pairs = enumerate(zip(before, after, strict=False))
    return after[next((i for i, (a, b) in pairs if a != b), len(before)) :]


def rows(kind: str, count: int) -> Iterator[tuple[dict[str, Any], list[tuple[str, Any]]]]:
    """(the functions' schemas, the calls that answer) of BFCL's rows."""
    folder = DATA / "structured" / "bfcl"
    if not folder.is_dir():
        pytest.skip("the shared data has no BFCL")
    questions = (folder / f"BFCL_v4_{kind}.json").read_text().splitlines()
    answers = (folder / "possible_answer" / f"BFCL_v4_{kind}.json").read_text().splitlines()
    for asked, answered in zip(questions[:count], answers[:count], strict=True):
        schemas = {x["name"]: _schema(x["parameters"]) for x in json.loads(asked)["function"]}
        calls = []
        for call in json.loads(answered)["ground_truth"]:
            ((name, arguments),) = call.items()
            calls.append((name, {k: v[0] for k, v in arguments.items() if v[0] != ""}))
        yield schemas, calls


def _schema(value: Any) -> Any:
    """BFCL's types in JSON schema's words."""
    words = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(value, dict):
        return {k: words.get(v, v) if k == "type" and isinstance(v, str) else _schema(v)
                for k, v in value.items()}  # fmt: skip
    return [_schema(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", _WRITING)
@pytest.mark.parametrize("kind", ["parallel_multiple", "multiple"])
def test_what_a_template_writes_is_read_again(name: str, kind: str) -> None:
    """BFCL's answers through the models' own templates, an outside reference for the forms."""
    source = template(name)
    family = TOOL_PARSERS[TEMPLATES[name][0]]
    for schemas, calls in rows(kind, 25):
        several = TEMPLATES[name][3]
        for turn in [calls] if several else [[call] for call in calls]:
            # The prompt has Llama's header already, and its calls begin the answer.
            text = written(source, turn).removeprefix(LLAMA_HEADER)
            found = family.reader(schemas).parse(text)
            assert [(x.name, json.loads(x.arguments)) for x in found.calls] == turn


@pytest.mark.parametrize("kind", ["simple_python", "parallel_multiple", "multiple", "parallel"])
def test_pythonic_calls_are_read_again(kind: str) -> None:
    """As Python prints them: no template quotes its texts as Python does."""
    for schemas, calls in rows(kind, 200):
        listed = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
        found = TOOL_PARSERS["pythonic"].reader(schemas).parse(f"[{', '.join(listed)}]")
        assert [(x.name, json.loads(x.arguments)) for x in found.calls] == calls


@pytest.mark.parametrize(
    "form",
    [
        (forms.HERMES, "hermes"), (forms.LLAMA3_JSON, "llama3_json"),
        (forms.MISTRAL_LIST, "mistral"), (forms.MISTRAL_NAMED, "mistral"),
        (forms.DEEPSEEK_V3, "deepseek_v3"), (forms.DEEPSEEK_V31, "deepseek_v31"),
        (forms.HARMONY, "openai"),
    ],
    ids=lambda pair: f"{pair[1]} {pair[0].opening[:1]}",
)  # fmt: skip
def test_what_a_form_writes_is_read_again(form: tuple[forms.Form, str]) -> None:
    for schemas, calls in rows("parallel_multiple", 50):
        turns = [calls] if form[0].several else [[call] for call in calls]
        for turn in turns:
            text = form[0].write(Call(n, json.dumps(a, ensure_ascii=False)) for n, a in turn)
            found = TOOL_PARSERS[form[1]].reader(schemas).parse(text)
            assert [(x.name, json.loads(x.arguments)) for x in found.calls] == turn
            assert found.content == ""


def test_lfm2_is_told_by_its_list_of_tools() -> None:
    """Its template has no calls in it: an earlier one is what the assistant has said."""
    tools = "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>"
    assert family_of(tools) is TOOL_PARSERS["lfm2"]

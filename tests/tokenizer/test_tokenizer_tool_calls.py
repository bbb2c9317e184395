"""Earlier tool calls: each real template gets the form that it writes whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.tokenizer import Tokenizer
from penstock.tokenizer.chat import render_chat
from penstock.tokenizer.tool_calls import ToolCallForm, tool_call_form

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT.parent / "shared" / "data" / "templates").rglob("*.jinja"))
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
OBJECT, TEXT = {"city": "Köln"}, '{"city": "Köln"}'

# What no default would do: they join the arguments to text, or ask whether the content is none.
OTHERS = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ToolCallForm(True, None),
    "llama-cpp-deepseek-r1": ToolCallForm(True, None),
    "meetkai-functionary-medium-v3.2": ToolCallForm(True, ""),
}


def conversation(form: ToolCallForm) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": TEXT if form.arguments_as_text else OBJECT}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": form.content, "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees", "tool_call_id": "abcdefghi"},
    ]


@pytest.mark.skipif(not TEMPLATES, reason="no shared data")
def test_real_templates_write_the_call_whole() -> None:
    """Every template that has the call in any form has it unescaped, as transformers writes it."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    whole = 0
    for path in TEMPLATES:
        template = path.read_text(encoding="utf-8")
        form = tool_call_form(template)
        if path.parent.name == "llama.cpp-2025-02" and path.stem in OTHERS:
            assert form == OTHERS[path.stem]
        try:
            chat = conversation(form)
            ((expected,), _) = reference.render_jinja_template(
                [chat], chat_template=template, add_generation_prompt=True, **NAMES
            )
        except Exception:  # it needs `tools`, or another order of roles
            continue
        prompt = render_chat(template, chat, variables=NAMES)
        assert prompt == expected
        assert r"\"city" not in prompt
        assert "{'city'" not in prompt
        whole += "get_weather" in prompt and ("Köln" in prompt or r"K\u00f6ln" in prompt)
    assert whole > 80


@pytest.mark.skipif(not TEMPLATES, reason="no shared data")
@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"])
def test_usual_templates_get_objects(name: str) -> None:
    (path,) = [p for p in TEMPLATES if p.stem == name and "llama.cpp-2025" in str(p)]
    assert tool_call_form(path.read_text()) == ToolCallForm()
    prompt = render_chat(path.read_text(), conversation(ToolCallForm()), variables=NAMES)
    assert '": {"city": "Köln"}}' in prompt


def test_the_embedded_models_template_shows_calls() -> None:
    tokenizer = Tokenizer.from_folder(ROOT / "src" / "penstock" / "assets" / "stories")
    assert tokenizer.tool_call_form() == ToolCallForm()
    for content in (None, ""):
        prompt = tokenizer.apply_chat_template(conversation(ToolCallForm(content=content)))
        call = json.dumps({"name": "get_weather", "arguments": OBJECT}, ensure_ascii=False)
        assert re.findall(r"<tool_call>\n?(.*)\n?</tool_call>", prompt) == [call]
        assert "None" not in prompt


def test_a_template_that_knows_no_calls_gets_a_text() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    assert tool_call_form(template) == ToolCallForm()
    assert tool_call_form("{{ raise_exception('no') }}") == ToolCallForm()

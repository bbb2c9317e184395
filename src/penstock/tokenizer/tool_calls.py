"""Earlier tool calls, in the form that a chat template writes.

Clients send a call's arguments as JSON text and often no content beside it. Most templates want the
arguments as an object, which they write as JSON themselves: a text would be escaped once more. Some
join them to other text, and some look whether the content is none. So each template is tried once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ChatTemplateError
from penstock.tokenizer.chat import NAMED_TOKENS, fit_contents, render_chat

_NAME, _ARGUMENT, _VALUE = "probe_function", "probe_argument", "probe_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": "other_function",
        "description": "other",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a turn of the assistant with `tool_calls` is given to a template."""

    arguments_as_text: bool = False  # JSON text instead of an object
    content: str | None = ""  # where the turn says nothing beside its calls

    def shown_by(self, template: str, *, tools: bool = False) -> str | None:
        """The probe's prompt, or None where the template refuses it. tools: it is given some."""
        arguments: Any = {_ARGUMENT: _VALUE}
        if self.arguments_as_text:
            arguments = f'{{"{_ARGUMENT}": "{_VALUE}"}}'
        call = {"id": "probe0000", "type": "function",
                "function": {"name": _NAME, "arguments": arguments}}  # fmt: skip
        messages: list[Mapping[str, Any]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": self.content, "tool_calls": [call]},
            {"role": "tool", "content": "answer", "tool_call_id": "probe0000", "name": _NAME},
        ]
        names = dict.fromkeys(NAMED_TOKENS, "")
        offered = [_TOOL] if tools else None
        try:
            fitting = fit_contents(template, messages)
            return render_chat(template, fitting, tools=offered, variables=names)
        except ChatTemplateError:
            return None


# Templates are written for the first one, as transformers documents it.
_FORMS = (
    ToolCallForm(),
    ToolCallForm(content=None),
    ToolCallForm(arguments_as_text=True),
    ToolCallForm(arguments_as_text=True, content=None),
)


@functools.lru_cache(maxsize=64)
def tool_call_form(template: str) -> ToolCallForm:
    """The first form whose call the template writes whole; else the first that it doesn't refuse.

    A template that shows no call in any form knows none.
    """
    shown = {form: form.shown_by(template) for form in _FORMS}
    for form, prompt in shown.items():
        if prompt is not None and _is_whole(prompt):
            return form
    return next((form for form, prompt in shown.items() if prompt is not None), _FORMS[0])


@functools.lru_cache(maxsize=64)
def writes_calls(template: str) -> bool:
    """Whether a template writes earlier calls at all; others leave them out without a word."""
    prompts = (form.shown_by(template, tools=tools) for form in _FORMS for tools in (False, True))
    return any(x is not None and all(y in x for y in (_NAME, _VALUE)) for x in prompts)


@functools.lru_cache(maxsize=64)
def writes_system(template: str) -> bool:
    """Whether a template writes what the system says, and doesn't refuse it."""
    messages = [{"role": "system", "content": _VALUE}, {"role": "user", "content": "question"}]
    try:
        prompt = render_chat(template, messages, variables=dict.fromkeys(NAMED_TOKENS, ""))
    except ChatTemplateError:
        return False
    return _VALUE in prompt


def _is_whole(prompt: str) -> bool:
    """Whether the call is there, and not as Python spells a dictionary."""
    return all(x in prompt for x in (_NAME, _ARGUMENT, _VALUE)) and f"{{'{_ARGUMENT}" not in prompt

"""Contents of messages in the form that a template writes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tokenizer.chat import fit_contents
from penstock.tokenizer.tool_calls import tool_call_form, writes_calls

ONLY_TEXTS = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
PRINTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
ONLY_PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    "{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
REFUSES = "{{ raise_exception('Never.') }}"
TEXT, PARTS = "say", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SEEN = [{"type": "image"}, *PARTS]


@pytest.mark.parametrize(
    ("template", "content", "fitting"),
    [
        (ONLY_TEXTS, TEXT, TEXT),
        (ONLY_TEXTS, PARTS, "a\nb"),
        (PRINTS, PARTS, "a\nb"),
        (PRINTS, SEEN, SEEN),  # what stands for a picture is the template's to say
        (ONLY_PARTS, TEXT, [{"type": "text", "text": TEXT}]),
        (ONLY_PARTS, "", [{"type": "text", "text": ""}]),
        (ONLY_PARTS, SEEN, SEEN),
        (BOTH, TEXT, TEXT),
        (BOTH, PARTS, PARTS),
        (REFUSES, PARTS, "a\nb"),
        (ONLY_PARTS, None, None),
    ],
)
def test_contents(template: str, content: Any, fitting: Any) -> None:
    message = {"role": "user", "content": content, "name": "x"}
    assert list(fit_contents(template, [message])) == [{**message, "content": fitting}]
    assert message["content"] is content


def test_messages_without() -> None:
    messages: list[Any] = [{"role": "user"}, 7]
    assert list(fit_contents(ONLY_PARTS, messages)) == messages


def test_calls_beside_parts() -> None:
    assert writes_calls(ONLY_PARTS) and not tool_call_form(ONLY_PARTS).arguments_as_text

"""Chat templates: a conversation rendered as one prompt, as `transformers` renders it."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from penstock.errors import ChatTemplateError, kind_of
from penstock.tokenizer.sandbox import (
    MAX_TEXT_CHARACTERS,
    Budget,
    budget,
    compile_template,
    join_pieces,
    variables_of,
)

# Put at the end of the final message to find where it ends in the rendered text. The space shows
# whether the template strips its messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which clients and templates pass a message's reasoning.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
_SAID = "probe of contents"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render the template's source with the conversation.

    With `continue_final_message` the prompt ends inside the last message, for the model to go on
    writing it. Raises `ChatTemplateError` for a template that is wrong, unsafe or refuses the
    messages, with what it says itself.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message and add_generation_prompt are both set: one goes on with the "
            "last message, the other starts a new one. Pass add_generation_prompt=False."
        )
    chat = [_message(message, index) for index, message in enumerate(messages)]
    context = {
        **{name: plain_data(value) for name, value in (variables or {}).items()},
        "messages": chat,
        "tools": _mappings("tools", tools),
        "documents": _mappings("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    if not continue_final_message:
        return _render(template, context)
    final = _tag_final_message(chat)
    return _cut_at_tag(_render(template, context), final)


def fit_contents(
    template: str, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The messages with contents in a form that the template writes; `render_chat`, as
    transformers, gives it what it is given.
    """
    form = _content_form(template)
    if form.texts and form.parts:
        return messages
    return [
        {**message, "content": form.of(message["content"])}
        if isinstance(message, Mapping) and "content" in message
        else message
        for message in messages
    ]


def template_variables(template: str) -> frozenset[str]:
    """The names that a template may look up. Raises `ChatTemplateError` for one that is wrong."""
    try:
        return variables_of(template)
    except Exception as error:
        raise ChatTemplateError(_describe(error)) from error


def plain_data(value: Any) -> Any:
    """The value rebuilt of JSON's types, so that a template can't reach an object's methods.

    Anything else (an image) becomes a placeholder: templates only look whether it is there.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (str, int, float):  # subclasses, such as enums, carry methods
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_data(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain_data(getattr(value, field.name)) for field in fields}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


class _ContentForm(NamedTuple):
    """In which forms a template writes what a message says."""

    texts: bool = True
    parts: bool = False

    def of(self, content: Any) -> Any:
        """A content in a form that is written: vision models' templates leave out texts, and older
        ones know no parts. Pictures can't be said as a text.
        """
        if isinstance(content, str) and self.parts and not self.texts:
            return [{"type": "text", "text": content}]
        if not isinstance(content, list) or self.parts or not self.texts:
            return content
        said = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [text for text in said if isinstance(text, str)]
        return "\n".join(texts) if len(texts) == len(content) else content


@functools.lru_cache(maxsize=64)
def _content_form(template: str) -> _ContentForm:
    """What a template makes of a message in each form, tried once."""

    def written(content: Any) -> str:
        context: dict[str, Any] = dict.fromkeys(NAMED_TOKENS, "")
        context |= {"messages": [{"role": "user", "content": content}], "tools": None}
        try:
            return _render(template, {**context, "add_generation_prompt": True})
        except ChatTemplateError:
            return ""  # what it wants besides, whoever asks will be told

    parts = written([{"type": "text", "text": _SAID}])
    as_data = any(f"{quote}text{quote}" in parts for quote in ("'", '"'))  # a list, printed
    found = _ContentForm(_SAID in written(_SAID), _SAID in parts and not as_data)
    return found if any(found) else _ContentForm()


def _message(message: Any, index: int) -> dict[str, Any]:
    plain = plain_data(message)
    if not isinstance(plain, dict):
        raise ChatTemplateError(
            f"messages[{index}] is {kind_of(message)}. Every message must be a mapping "
            f"such as {{'role': 'user', 'content': '…'}}."
        )
    reasoning = next(
        (plain[name] for name in _REASONING_FIELDS if plain.get(name) is not None), None
    )
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _mappings(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    for index, value in enumerate(values or ()):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(
                f"{name}[{index}] of {len(values or ())} is {kind_of(value)}. Pass "
                f"mappings; a function must be described by its JSON schema."
            )
    return None if values is None else [plain_data(value) for value in values]


def check_template(template: str) -> None:
    """Raises ChatTemplateError for a template that no conversation can be written by."""
    try:
        compile_template(template)
    except Exception as error:  # as where it is rendered
        raise ChatTemplateError(_describe(error)) from error


def _render(template: str, context: Mapping[str, Any]) -> str:
    """Run the template within its budget."""
    token = budget.set(None)
    try:
        compiled = compile_template(template)
        budget.set(Budget())
        pieces, length = [], 0
        for piece in compiled.generate(**context):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_TEXT_CHARACTERS:
                raise SecurityError(f"it wrote more than {MAX_TEXT_CHARACTERS:,} characters")
        return join_pieces(pieces)
    except Exception as error:  # templates raise whatever Python raises: TypeError, KeyError, …
        raise ChatTemplateError(_describe(error)) from error
    finally:
        budget.reset(token)


def _describe(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        line: int | None = error.lineno
    else:
        # jinja2 rewrites tracebacks: frames of a template carry its own line numbers.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename in ("<template>", "<unknown>")]
        line = lines[-1] if lines else None
    place = f" at line {line}" if line is not None else ""
    kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
    message = str(error)
    stop = "" if message.endswith((".", "!", "?")) else "."
    return (
        f"The chat template failed{place}: {kind}{message}{stop} "
        f"Change the messages to what the template accepts, or pass another chat_template."
    )


def _tag_final_message(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text; the text as it was."""
    final = chat[-1].get("content") if chat else None
    if isinstance(final, str):
        chat[-1]["content"] = final + _CONTINUE_TAG
        return final
    if isinstance(final, list):
        for part in reversed(final):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _CONTINUE_TAG
                return text
    raise ChatTemplateError(
        f"continue_final_message is set, but the last of {len(chat)} messages has no text to "
        f"continue. Give it a content, or pass continue_final_message=False."
    )


def _cut_at_tag(rendered: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in rendered or tag not in rendered:
        raise ChatTemplateError(
            f"continue_final_message is set, but the template doesn't keep the last message "
            f"({len(final)} characters, beginning {final.strip()[:40]!r}) as it is. Pass "
            f"continue_final_message=False, or a template that keeps it."
        )
    position = rendered.rindex(tag)
    if rendered.startswith(_CONTINUE_TAG, position):
        return rendered[:position]
    return rendered[:position].rstrip()

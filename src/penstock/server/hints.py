"""What a request hints at of reasoning, in the words of chat templates that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ChatTemplateError
from penstock.tokenizer import Tokenizer

_MOST = 64  # of which it is known whether templates heed them
_EFFORT = "reasoning_effort"
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # in their order; none is another


def thinking(on: bool) -> dict[str, Any]:
    """Whether the model reasons: Qwen's variable, and DeepSeek's."""
    return {"enable_thinking": on, "thinking": on}


def effort_hint(name: str, effort: str | None) -> dict[str, dict[str, Any]]:
    """How much it does, by the request's `name` for that; nothing where it isn't said."""
    if effort is None:
        return {}
    return {name: thinking(False) if effort == "none" else {_EFFORT: effort}}


class Hints:
    """Which hints templates heed, found out once for each. For any thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None where prompts can only be tokens."""
        self._tokenizer = tokenizer
        self._known: dict[Any, dict[str, Any]] = {}  # by template and variables

    def heeded(self, template: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Of these variables, those that a template reads; none where it refuses their values.

        Of an effort that it refuses, the nearest that it takes: of two, the greater one.
        """
        if self._tokenizer is None:
            return {}
        key = (template, tuple(variables.items()))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[key] = _tried(self._tokenizer, template, variables)
        return found


def _tried(
    tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        read = tokenizer.template_variables(template)
    except ChatTemplateError:
        return {}  # as rendering will say
    chosen = {name: value for name, value in variables.items() if name in read}
    if not chosen or _writes(tokenizer, template, chosen) or not _writes(tokenizer, template, {}):
        return chosen
    for effort in _nearest(chosen.get(_EFFORT)):
        other = chosen | {_EFFORT: effort}
        if _writes(tokenizer, template, other):
            return other
    return {}


def _nearest(effort: Any) -> list[str]:
    """The other efforts, from the nearest on."""
    if effort not in _EFFORTS:
        return []
    at = _EFFORTS.index(effort)
    ways = sorted(range(len(_EFFORTS)), key=lambda i: (abs(i - at), -i))
    return [_EFFORTS[i] for i in ways if i != at]


def _writes(tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], chat_template=template, **variables
        )
    except ChatTemplateError:
        return False
    return True

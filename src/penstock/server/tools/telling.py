"""How a conversation tells a model of tools, where its template can and where it can't."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.server.tools.events import Call
from penstock.server.tools.forms import Form


@dataclass(frozen=True, slots=True)
class Telling:
    """What a conversation says of tools beside its messages.

    tools: for the template; instructions: for the system's message, where the template has no words
    for tools, or the first user's, where it refuses the system's; history: how earlier calls are
    written where the template would leave them out.
    """

    tools: tuple[dict[str, Any], ...] = ()
    instructions: str | None = None
    in_system: bool = True
    history: Form | None = None
    size: int = 0  # characters of the tools as JSON

    @property
    def shown(self) -> str:
        """The tools as text, about as a prompt has them."""
        return self.instructions or json.dumps(self.tools, ensure_ascii=False)

    def told(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with the instructions in them."""
        made = list(messages)
        if self.instructions is None:
            return made
        if self.in_system and not (made and made[0]["role"] == "system"):
            return [{"role": "system", "content": self.instructions}, *made]
        roles = [message["role"] for message in made]
        at = 0 if self.in_system or "user" not in roles else roles.index("user")
        said, told = made[at].get("content") or "", self.instructions
        if isinstance(said, list):  # with pictures, so a user's
            made[at] = {**made[at], "content": [{"type": "text", "text": f"{told}\n\n"}, *said]}
            return made
        both = f"{said}\n\n{told}" if self.in_system else f"{told}\n\n{said}"
        made[at] = {**made[at], "content": both.strip("\n")}
        return made


def without_calls(message: dict[str, Any], form: Form) -> dict[str, Any]:
    """A message for a template that knows no calls: they, and what came of them, as text."""
    if message["role"] == "tool":
        said = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": said}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(Call(function["name"], text))
    said = "\n".join(filter(None, (message.get("content"), form.write(calls))))
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": said}

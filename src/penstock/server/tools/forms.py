"""How each family writes calls: what a grammar holds a model to, and what a conversation shows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.server.tools import deepseek, gemma4, harmony, hermes, mistral, pythonic, qwen3_coder
from penstock.server.tools.events import Call


@dataclass(frozen=True, slots=True)
class Form:
    """Several calls are opening, call, between, call, …, closing.

    A call is `before` (with the tool's name in place of `NAME`), its arguments, `after`. trigger:
    what a model writes only to begin a call. several: more than one call fits into a turn.
    leading: nothing marks a call but that the answer begins with it. arguments: what they are
    written as.
    """

    before: str
    after: str = ""
    between: str = ""
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    several: bool = True
    leading: bool = False
    arguments: str = "json"  # or "python", "xml", "gemma"

    def write(self, calls: Iterable[Call]) -> str:
        """The calls as an answer has them. Only for arguments that are JSON."""
        assert self.arguments == "json", self.arguments
        body = self.between.join(
            self.before.replace(NAME, call.name) + call.arguments + self.after for call in calls
        )
        return self.opening + body + self.closing


NAME = "\N{REPLACEMENT CHARACTER}"
"""Stands for the tool's name, which never has this character."""

HERMES = Form(
    before=f'{hermes.OPEN}\n{{"name": "{NAME}", "arguments": ',
    after=f"}}\n{hermes.CLOSE}",
    between="\n",
    trigger=hermes.OPEN,
)
QWEN3_CODER = Form(
    before=f"{hermes.OPEN}\n{qwen3_coder.FUNCTION}{NAME}>\n",
    after=f"{qwen3_coder.FUNCTION_END}\n{hermes.CLOSE}",
    between="\n",
    trigger=hermes.OPEN,
    arguments="xml",
)
LLAMA3_JSON = Form(
    before=f'{{"name": "{NAME}", "parameters": ', after="}", between="; ", leading=True
)
PYTHONIC = Form(
    before=f"{NAME}(", after=")", between=", ", opening="[", closing="]", arguments="python"
)
LFM2 = replace(
    PYTHONIC,
    opening=f"{pythonic.LFM2_START}[",
    closing=f"]{pythonic.LFM2_STOP}",
    trigger=pythonic.LFM2_START,
)
MISTRAL_LIST = Form(
    before=f'{{"name": "{NAME}", "arguments": ',
    after="}",
    between=", ",
    opening=f"{mistral.OPEN}[",
    closing="]",
    trigger=mistral.OPEN,
)
MISTRAL_NAMED = Form(before=f"{mistral.OPEN}{NAME}{mistral.ARGS}", trigger=mistral.OPEN)
DEEPSEEK_V3 = Form(
    before=f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{NAME}\n{deepseek.FENCE}\n",
    after=f"\n{deepseek.FENCE_END}{deepseek.CALL_END}",
    between="\n",
    opening=deepseek.CALLS_BEGIN,
    closing=deepseek.CALLS_END,
    trigger=deepseek.CALLS_BEGIN,
)
DEEPSEEK_V31 = Form(
    before=f"{deepseek.CALL_BEGIN}{NAME}{deepseek.SEPARATOR}",
    after=deepseek.CALL_END,
    opening=deepseek.CALLS_BEGIN,
    closing=deepseek.CALLS_END,
    trigger=deepseek.CALLS_BEGIN,
)
GEMMA4 = Form(
    before=f"{gemma4.OPEN}{gemma4.CALL}{NAME}",
    after=gemma4.CLOSE,
    trigger=gemma4.OPEN,
    arguments="gemma",
)
HARMONY = Form(
    before=f"{harmony.CHANNEL}commentary to=functions.{NAME} <|constrain|>json{harmony.MESSAGE}",
    several=False,  # what ends a call ends the answer
)


def instructions(tools: Iterable[object], form: Form) -> str:
    """What a model is told whose template says nothing of tools: much as Hermes' says it.

    Source: the chat templates of Hermes 2 Pro and Qwen2.5, shortened.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.write([Call("<name>", "<arguments as a JSON object>")])
    return (
        "# Tools\n\nYou may call one or more of these functions:\n"
        f"<tools>\n{listed}\n</tools>\n\nWrite each call so:\n{example}"
    )

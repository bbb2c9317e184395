"""The families of models: which is told by a chat template, and what belongs to it."""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.server.tools import (
    deepseek,
    forms,
    gemma4,
    harmony,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from penstock.server.tools.forms import Form
from penstock.server.tools.reader import CallReader
from penstock.server.tools.reasoning import ThinkTags

_LETTERS = string.ascii_letters + string.digits


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Mistral's templates refuse any other when it comes back."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models calls tools.

    marks: what its reader looks for and a tokenizer may have as special tokens. thinks: its reader
    reads the reasoning too.
    """

    name: str  # vLLM's, for --tool-call-parser
    reader: type[CallReader]
    form: Form
    marks: tuple[str, ...] = ()
    new_id: Callable[[], str] = field(default=_long_id)
    thinks: bool = False


_DEEPSEEK_MARKS = (
    deepseek.CALLS_BEGIN, deepseek.CALLS_END, deepseek.CALL_BEGIN, deepseek.CALL_END,
    deepseek.SEPARATOR,
)  # fmt: skip
_HARMONY_MARKS = (
    harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.RETURN, harmony.CALL,
    "<|constrain|>",
)  # fmt: skip
_HERMES_MARKS = (hermes.OPEN, hermes.CLOSE)

HERMES: Final = Family("hermes", hermes.HermesReader, forms.HERMES, _HERMES_MARKS)
QWEN3_CODER: Final = Family(
    "qwen3_coder", qwen3_coder.Qwen3CoderReader, forms.QWEN3_CODER, _HERMES_MARKS
)
LLAMA3_JSON: Final = Family(
    "llama3_json", llama3_json.Llama3JsonReader, forms.LLAMA3_JSON, (llama3_json.TAG,)
)
PYTHONIC: Final = Family(
    "pythonic", pythonic.PythonicReader, forms.PYTHONIC, (pythonic.START, pythonic.STOP)
)
LFM2: Final = Family(
    "lfm2", pythonic.Lfm2Reader, forms.LFM2, (pythonic.LFM2_START, pythonic.LFM2_STOP)
)
MISTRAL: Final = Family(
    "mistral", mistral.MistralReader, forms.MISTRAL_LIST,
    (mistral.OPEN, mistral.ARGS, mistral.CALL_ID), _short_id,
)  # fmt: skip
MISTRAL_NAMED: Final = replace(MISTRAL, form=forms.MISTRAL_NAMED)
DEEPSEEK_V3: Final = Family(
    "deepseek_v3", deepseek.DeepSeekReader, forms.DEEPSEEK_V3, _DEEPSEEK_MARKS
)
DEEPSEEK_V31: Final = replace(DEEPSEEK_V3, name="deepseek_v31", form=forms.DEEPSEEK_V31)
GEMMA4: Final = Family(
    "gemma4", gemma4.Gemma4Reader, forms.GEMMA4, (gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE)
)
HARMONY: Final = Family("openai", harmony.HarmonyReader, forms.HARMONY, _HARMONY_MARKS, thinks=True)

TOOL_PARSERS: Final = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
    "lfm2": LFM2,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "gemma4": GEMMA4,
    "openai": HARMONY,
}
"""vLLM's names for `--tool-call-parser`, beside auto."""

_THINK: Final = ThinkTags("<think>", "</think>")
_MAGISTRAL: Final = ThinkTags("[THINK]", "[/THINK]")
_GEMMA4_TAGS: Final = ThinkTags("<|channel>", "<channel|>", "thought\n")
REASONING_PARSERS: Final = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "qwen3": _THINK,
    "mistral": _MAGISTRAL,
    "gemma4": _GEMMA4_TAGS,
    "none": None,
}
"""vLLM's names for `--reasoning-parser`, beside auto. none: reasoning stays in the answer."""


@functools.lru_cache(maxsize=64)
def family_of(template: str) -> Family | None:
    """The family whose form a chat template describes or writes; None where it has another."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    if deepseek.CALL_BEGIN in template:
        fenced = deepseek.FENCE in template
        return DEEPSEEK_V3 if fenced else DEEPSEEK_V31
    if gemma4.OPEN + gemma4.CALL in template:
        return GEMMA4
    if mistral.OPEN in template:
        return MISTRAL_NAMED if mistral.ARGS in template else MISTRAL
    if "<tool_calls>" in template:
        return None
    if hermes.OPEN in template:
        if "<function=" in template and "<parameter=" in template:
            return QWEN3_CODER
        return HERMES if '"name"' in template or "'name'" in template else None
    if pythonic.LFM2_START in template or "<|tool_list_start|>" in template:
        return LFM2
    if "[func_name1(" in template:
        return PYTHONIC
    if "<function=" in template:
        return None
    if llama3_json.TAG in template or '"parameters": dictionary' in template:
        return LLAMA3_JSON
    return None


@functools.lru_cache(maxsize=64)
def tags_of(template: str) -> ThinkTags | None:
    """The tags around the reasoning that a chat template knows."""
    for tags in (_MAGISTRAL, _GEMMA4_TAGS):
        if tags.open in template:
            return tags
    return _THINK if _THINK.close in template and "<response>" not in template else None

"""What callers may give as a prompt, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidPromptError, InvalidSamplingError, TokenizerError, nearest
from penstock.sampling import CUTS, SUGGESTED, SamplingParams
from penstock.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = ("prompt", "prompt_token_ids")
_MESSAGE = "{'role': 'user', 'content': '…'}"


def split(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; several as they are."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidPromptError(
            f"Prompts are a text, a list of token ids, or a list of these, not "
            f"{type(prompts).__name__}."
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(x, int) for x in items):
        return [items]
    return items


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Sequence[int]]:
    """(text or None, token ids)."""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown or len(prompt) == 0:
            name = str(unknown[0]) if unknown else ""
            raise InvalidPromptError(
                f"A prompt dictionary takes {' or '.join(_KEYS)}, not {name!r}."
                f"{nearest(name, _KEYS)}"
            )
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidPromptError(
                    "The prompt beside prompt_token_ids must be the text that they stand for, not "
                    f"{type(text).__name__}. Leave it out, or pass a text."
                )
            return text, prompt["prompt_token_ids"]
        return encode(prompt["prompt"], tokenizer)
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidPromptError(
                f"A prompt must be a text or a list of token ids, not {type(prompt).__name__}."
            )
        tokens: Any = prompt
        return None, tokens
    if tokenizer is None:
        raise TokenizerError("A text prompt needs a tokenizer, but skip_tokenizer_init is set.")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise InvalidPromptError(
            "The prompt is empty, and this model's tokenizer puts no token before a text. Give at "
            "least one character."
        )
    return prompt, ids


def split_chats(messages: Any) -> list[Any]:
    """One conversation as a list of one; several as they are."""
    _check_list(messages)
    several = messages and isinstance(messages[0], list | tuple)
    return list(messages) if several else [messages]


def encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
) -> Mapping[str, Any]:
    """A conversation through the chat template, which writes its own special tokens.

    Raises InvalidPromptError for what a server would refuse too: templates write "None" for it, or
    nothing.
    """
    _check_messages(messages)
    text = tokenizer.apply_chat_template(messages, **options)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _check_list(messages: Any) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPromptError(
            f"A conversation must be a list of messages such as {_MESSAGE}, not "
            f"{type(messages).__name__}."
        )


def _check_messages(messages: Any) -> None:
    from penstock.tokenizer.chat import plain_data  # and jinja2, a tenth of a second

    _check_list(messages)
    if not messages:
        raise InvalidPromptError("A conversation has 0 messages; at least 1 is needed.")
    for i, message in enumerate(messages):
        plain = plain_data(message)
        if not isinstance(plain, dict):
            raise InvalidPromptError(
                f"messages[{i}] must be a mapping such as {_MESSAGE}, not {type(message).__name__}."
            )
        role, content = plain.get("role"), plain.get("content")
        if not isinstance(role, str):
            said = f"has {role!r:.40} for its role" if "role" in plain else "has no role"
            raise InvalidPromptError(f"messages[{i}] {said}. Give one, such as in {_MESSAGE}.")
        if content is None and not plain.get("tool_calls"):
            raise InvalidPromptError(
                f"messages[{i}], of the {role:.40}, has no content. Give a text, if only ''."
            )
        if content is not None and not isinstance(content, str | list | tuple):
            raise InvalidPromptError(
                f"The content of messages[{i}], of the {role:.40}, must be a text or a list of "
                f"parts, not {type(content).__name__}."
            )


def check_chat(params: object) -> None:
    """Raises InvalidSamplingError for sampling parameters, one or several, of completions only."""
    for one in params if isinstance(params, list | tuple) else [params]:
        if isinstance(one, SamplingParams) and one.token_healing:
            raise InvalidSamplingError(
                "token_healing is of completions: a chat's prompt ends in its template's own "
                "tokens, none of which the answer changes. Leave it out, or use generate()."
            )


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters that `generation_config.json` suggests, vLLM's defaults otherwise."""
    chosen = {k: generation[k] for k in SUGGESTED if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        chosen = {k: v for k, v in chosen.items() if k not in CUTS} | {"temperature": 0.0}
    if generation.get("max_new_tokens"):
        chosen["max_tokens"] = generation["max_new_tokens"]
    return SamplingParams(**chosen)

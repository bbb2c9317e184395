"""What callers may give as a prompt, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidPromptError, InvalidSamplingError, TokenizerError, nearest
from penstock.sampling import CUTS, SUGGESTED, SamplingParams
from penstock.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = ("prompt", "prompt_token_ids")


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
            return prompt.get("prompt"), prompt["prompt_token_ids"]
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
    if not prompt:
        raise InvalidPromptError("The prompt is empty. Give at least one character.")
    return prompt, tokenizer.encode(prompt)


def encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
) -> Mapping[str, Any]:
    """A conversation through the chat template, which writes its own special tokens."""
    text = tokenizer.apply_chat_template(messages, **options)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


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

"""What is asked: prompts of a file, or a few of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.runtime import Runtime

Prompt = str | list[int]
"""Text, or token ids where a model has no tokenizer."""

SPECIAL_TOKENS: Final = 8
"""At most so many are added to a text; beside them no token is less than a byte."""

_LEAST_OUTPUT: Final = 2
_MORE: Final = ("output", "prediction")

_BEGINNINGS = (
    "Once upon a time there was a little girl who lived near the sea.",
    "Tom and his dog went into the forest. It was getting dark, and",
    "One day, a small bird fell out of its nest. A cat saw it and",
    "Lily wanted to bake a cake for her mother, but there were no eggs.",
)

_TEXTS = (
    "Ben had a red ball. He played with the red ball in the park. One day the red ball rolled "
    "into the lake. Ben was sad, but a big duck pushed the red ball back to him.",
    "The old man had three goats. Every morning he took the three goats up the hill, and every "
    "evening the three goats came down with him. They were happy there.",
    "Mia found a key under a stone. The key was small and made of gold. She tried the key on the "
    "door of the shed, on the gate and on her box. It was the key of her box.",
)

_REQUESTS = (
    "Repeat this story word for word.\n\n{0}\n\nThe story again:\n",
    "Write this story again, but everybody in it is kind.\n\n{0}\n\nThe story again:\n",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of a kind, whose figures belong together."""

    name: str
    prompts: Sequence[Prompt]
    outputs: Sequence[Prompt | None] = ()  # what is said to each, where that is known
    predictions: Sequence[Prompt | None] = ()  # what whoever asks expects

    @property
    def most_tokens(self) -> int:
        """No prompt has more, in any vocabulary of at least single bytes."""
        return max(
            len(one.encode()) + SPECIAL_TOKENS if isinstance(one, str) else len(one)
            for one in self.prompts
        )

    @property
    def is_text(self) -> bool:
        """Whether any prompt needs a tokenizer."""
        return any(
            isinstance(one, str) for one in (*self.prompts, *self.outputs, *self.predictions)
        )


def built_in() -> list[Workload]:
    """Stories to go on with, and texts to write again: little and much of them was there before."""
    copies = [request.format(text) for text in _TEXTS for request in _REQUESTS]
    return [Workload("stories", _BEGINNINGS), Workload("copy", copies)]


def read_prompts(file: Path) -> Workload:
    """A prompt a line: of text, or, in a .jsonl file, of objects with the key "prompt".

    These may have "output" too: what is taken to be said to it; and "prediction", as in a chat.
    Raises ConfigError for a file that can't be read or holds no prompts.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {file} isn't UTF-8 text: {error}.") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(
            f"--prompts {file} holds no prompts: it has {len(lines)} lines, and all are empty. "
            "Write one a line."
        )
    if file.suffix == ".jsonl":
        found = [_object_of(file, i, line) for i, line in numbered]
        prompts = [one["prompt"] for one in found]
        outputs, predictions = ([one.get(key) for one in found] for key in _MORE)
        return Workload(
            file.name,
            prompts,
            outputs if any(outputs) else (),
            predictions if any(predictions) else (),
        )
    return Workload(file.name, [line for _, line in numbered])


def _object_of(file: Path, number: int, line: str) -> dict[str, Any]:
    where = f"Line {number} of --prompts {file}"
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} isn't JSON: {error}.") from error
    if not isinstance(found, dict) or "prompt" not in found:
        raise ConfigError(f'{where} must be an object with the key "prompt".')
    for key in ("prompt", *(key for key in _MORE if found.get(key) is not None)):
        text = found[key]
        is_ids = isinstance(text, list) and all(type(one) is int for one in text)
        if not text or not (isinstance(text, str) or is_ids):
            raise ConfigError(
                f'{where}: "{key}" must be a text or a list of token ids, and not empty; it is '
                f"{text!r:.60}."
            )
    return found


def encode(workload: Workload, runtime: Runtime, max_tokens: int) -> list[list[int]]:
    """The prompts' tokens. Raises ConfigError for one that is too long for the model."""
    found = []
    most = runtime.model.max_model_len
    for i, prompt in enumerate(workload.prompts, 1):
        if isinstance(prompt, str):
            assert runtime.tokenizer is not None  # loaded, for there is text
            ids = runtime.tokenizer.encode(prompt)
        else:
            ids = prompt
        if len(ids) + max_tokens > most:
            raise ConfigError(
                f"Prompt {i} of {workload.name} has {len(ids):,} tokens, and with --max-tokens "
                f"{max_tokens:,} that is {len(ids) + max_tokens:,}, but this model has {most:,} "
                "positions. Shorten the prompt or lower --max-tokens."
            )
        found.append(ids)
    return found


def encode_outputs(workload: Workload, runtime: Runtime) -> Sequence[list[int] | None]:
    """The tokens of what is said to each prompt, where that is known; nothing where none is.

    Raises ConfigError for one of fewer than two, which no step decodes, or that the model hasn't.
    """
    found: list[list[int] | None] = []
    for i, output in enumerate(workload.outputs, 1):
        ids = _ids(output, runtime)
        if ids is None:
            found.append(None)
            continue
        if len(ids) < _LEAST_OUTPUT:
            raise ConfigError(
                f"Output {i} of {workload.name} has {len(ids)} tokens, and a step is timed from "
                f"the second on: give {_LEAST_OUTPUT} or more, or none."
            )
        if wrong := [one for one in ids if not 0 <= one < runtime.vocab_size]:
            raise ConfigError(
                f"Output {i} of {workload.name} has the token {wrong[0]}, but this model has "
                f"{runtime.vocab_size:,}, from 0 up."
            )
        found.append(ids)
    return found


def encode_predictions(workload: Workload, runtime: Runtime) -> Sequence[list[int] | None]:
    """The tokens of what is expected of each output; the engine refuses what it can't guess by."""
    return [_ids(one, runtime) for one in workload.predictions]


def _ids(given: Prompt | None, runtime: Runtime) -> list[int] | None:
    """The tokens of what is no prompt."""
    if not isinstance(given, str):
        return given
    assert runtime.tokenizer is not None  # loaded, for there is text
    return list(runtime.tokenizer.encode(given, add_special_tokens=False))

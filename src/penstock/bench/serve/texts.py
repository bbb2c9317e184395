"""Prompts of real text: ShareGPT's conversations, or lines of one's own.

A text is its tokens, by the model's tokenizer: lengths are known, and prefixes that texts share are
found. Sources: ShareGPT's cleaned conversations as vLLM's benchmarks read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.bench.serve.traces import json_lines, open_text
from penstock.bench.serve.workload import Conversation, Turn, Workload
from penstock.errors import ConfigError, kind_of

if TYPE_CHECKING:
    from penstock.tokenizer import Tokenizer

SHORTEST, LONGEST, LONGEST_IN_ALL = 4, 1024, 2048
"""Tokens of a prompt and of an answer, of a prompt, and of both together, that ShareGPT's
conversations are kept with: vLLM's choice."""
CUSTOM_OUTPUT = 256
"""Tokens to ask for where neither a line nor an option says it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what it was answered with or how long an answer it asks for."""

    prompt: str
    answer: str | int | None


@dataclass(frozen=True, slots=True)
class Texts:
    """What a file holds."""

    file: Path
    all: tuple[Text, ...]


def read(name: str, file: Path) -> Texts:
    """Raises ConfigError for a file that isn't one of its kind."""
    found = tuple(_conversations(file) if name == "sharegpt" else _lines(file))
    if not found and name == "sharegpt":
        raise ConfigError(
            f"{file} has no conversation of two turns: ShareGPT's entries have a list "
            "`conversations` of objects with `value`."
        )
    if not found:
        raise ConfigError(f"{file} has no prompts.")
    return Texts(file, found)


def sharegpt(
    texts: Texts, number: int, *, tokenizer: Tokenizer, output_len: int | None, seed: int
) -> Workload:
    """First questions of `number` conversations, drawn by the seed.

    output_len: of every answer; None: as many tokens as the file's answer has.
    """
    file, found = texts.file, texts.all
    kept: list[Conversation] = []
    left_out = 0
    for i in np.random.default_rng(seed).permutation(len(found)).tolist():
        if len(kept) == number:
            break
        prompt, answer = found[i].prompt, str(found[i].answer)
        ids = _ids(tokenizer, prompt)
        wanted = len(_ids(tokenizer, answer)) if output_len is None else output_len
        short = len(ids) < SHORTEST or (output_len is None and wanted < SHORTEST)
        if short or len(ids) > LONGEST or len(ids) + wanted > LONGEST_IN_ALL:
            left_out += 1
            continue
        kept.append(Conversation((Turn(np.array(ids, np.int32), wanted),)))
    if not kept:
        raise ConfigError(
            f"{file}: none of its {len(found):,} conversations has {SHORTEST} to {LONGEST:,} "
            f"tokens of a question, {SHORTEST} of an answer, and {LONGEST_IN_ALL:,} together."
        )
    remarks = _left_out(left_out) if left_out else ()
    return Workload("sharegpt", tuple(kept), {"file": file.name}, remarks)


def custom(texts: Texts, number: int, *, tokenizer: Tokenizer, output_len: int | None) -> Workload:
    """The first `number` lines of a file of JSON objects: `prompt` and perhaps `output_tokens`."""
    file, made = texts.file, []
    for i, text in enumerate(texts.all[:number]):
        wanted = output_len or text.answer or CUSTOM_OUTPUT
        ids = _ids(tokenizer, text.prompt)
        if not ids:
            raise ConfigError(f"{file}: prompt {i + 1} has no tokens.")
        made.append(Conversation((Turn(np.array(ids, np.int32), int(wanted)),)))
    return Workload("custom", tuple(made), {"file": file.name})


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _left_out(count: int) -> tuple[str, ...]:
    return (
        f"{count:,} conversations left out: shorter than {SHORTEST} or longer than {LONGEST:,} "
        f"tokens ({LONGEST_IN_ALL:,} with the answer).",
    )


def _conversations(file: Path) -> Iterator[Text]:
    """First question and answer of each conversation that has both."""
    with open_text(file) as opened:
        try:
            found = json.load(opened)
        except (ValueError, RecursionError) as wrong:
            raise ConfigError(f"{file} isn't JSON: {wrong}.") from wrong
    if not isinstance(found, list):
        raise ConfigError(f"{file} isn't ShareGPT's: it is {kind_of(found)}, not a list.")
    for entry in found:
        said = entry.get("conversations") if isinstance(entry, dict) else None
        texts = [_value(each) for each in said[:2]] if isinstance(said, list) else []
        if len(texts) == 2 and texts[0] is not None and texts[1] is not None:
            yield Text(texts[0], texts[1])


def _value(turn: Any) -> str | None:
    found = turn.get("value") if isinstance(turn, dict) else None
    return found if isinstance(found, str) else None


def _lines(file: Path) -> Iterator[Text]:
    for i, found in json_lines(file):
        prompt, wanted = found.get("prompt"), found.get("output_tokens")
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{file}, line {i}: prompt is {prompt!r:.60}, not a text.")
        whole = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
        if wanted is not None and not whole:
            raise ConfigError(f"{file}, line {i}: output_tokens is {wanted!r:.60}, not above 0.")
        yield Text(prompt, wanted)

"""The embedded models' own text, for those who guess for them: what `recipes` trains them on."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from recipes.cleaning import digest
from recipes.dialogues import (
    CHATTERBOT,
    Conversation,
    read_dialogues,
    read_instructions,
    story_requests,
)
from recipes.prepare import split
from recipes.small_talk import small_talk
from recipes.sources import read_tinystories
from recipes.speculation.text import fingerprint
from recipes.tokenizer import render

SOURCES = (
    "tinystories/train_2M.txt", "tinystories/train_lowercase_tail.txt",
    "dialogue/sgd_train.jsonl", "dialogue/sgd_train_schema.json",
    "dialogue/sgd_dev.jsonl", "dialogue/sgd_dev_schema.json",
    "instruct/self-instruct/seed_tasks.jsonl",
    "instruct/self-instruct/user_oriented_instructions.jsonl",
)  # fmt: skip
"""Of the folder of texts; their state names the file that is made of them."""
TOPICS = tuple(f"instruct/chatterbot-english/{topic}.yml" for topic in CHATTERBOT)
"""The same, but read where they are, as `read_instructions` does."""
DIALOGUES = 2000  # with tools and without, of each kind; held-out ones come on top


def default_text(texts: Path, work: Path) -> Path:
    """JSON lines for `read_documents`, written once for each state of what they are made from.

    Raises ConfigError where a source is missing.
    """
    sources = [texts / name for name in SOURCES]
    missing = [str(source) for source in sources if not source.is_file()]
    if missing:
        raise ConfigError(
            f"The default text isn't in {texts} (there is no {', '.join(missing)}): give "
            "the folder by --texts, or a text of your own by --data."
        )
    sources += [texts / name for name in TOPICS if (texts / name).is_file()]
    key = hashlib.sha256("".join(map(fingerprint, sources)).encode()).hexdigest()[:16]
    file = work / f"family-{key}.jsonl"
    if not file.exists():
        partial = file.with_suffix(".partial")
        entries = (json.dumps(entry) + "\n" for entry in _entries(texts))
        partial.write_text("".join(entries), encoding="utf-8")
        partial.replace(file)
    return file


def _entries(texts: Path) -> Iterator[dict[str, Any]]:
    training, held_out = split(read_tinystories(texts))
    for stories, held in ((training["tinystories"], False), (held_out["tinystories"], True)):
        for story in stories:
            yield {"text": story, "held_out": held}
        for conversation in story_requests(stories):
            yield _entry(conversation, held)
    for conversation in (*_dialogues(texts), *read_instructions(texts), *small_talk()):
        yield _entry(conversation, conversation.held_out)


def _dialogues(texts: Path) -> Iterator[Conversation]:
    """The first of each kind in an order that mixes services, and a tenth as many held-out ones."""
    counts: dict[tuple[str, bool], int] = {}
    for conversation in sorted(read_dialogues(texts), key=lambda c: digest(c.identity)):
        key = conversation.kind, conversation.held_out
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= (DIALOGUES // 10 if conversation.held_out else DIALOGUES):
            yield conversation


def _entry(conversation: Conversation, held_out: bool) -> dict[str, Any]:
    """A conversation; its prompt is all before one of the assistant's replies."""
    messages, tools = conversation.messages, conversation.tools
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    at = replies[digest("reply " + conversation.identity) % len(replies)] if replies else 0
    entry = {"text": render(messages, tools), "held_out": held_out}
    if replies:
        entry["prompt"] = render(messages[:at], tools, add_generation_prompt=True)
    return entry

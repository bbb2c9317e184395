"""From the data folder to two packs: read, deduplicate, hold out, tokenize, compress."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from recipes.cleaning import digest
from recipes.corpus import PACKS, PackWriter, Stream, describe
from recipes.dialogues import (
    HELD_OUT_SERVICES,
    Conversation,
    read_dialogues,
    read_instructions,
    story_requests,
)
from recipes.duplicates import Deduplicator
from recipes.replies import tokenize_replies
from recipes.small_talk import small_talk
from recipes.sources import Document, read_texts
from recipes.tokenizer import END_OF_TEXT, VOCAB_SIZE, render, train_tokenizer

CONTEXT = 1024
VOCABULARY_BYTES = {  # how much of each source the merges are learned from
    "tinystories": 4_000_000,
    "short_stories": 6_000_000,
    "novels": 6_000_000,
    "science_fiction": 2_000_000,
    "shakespeare": 500_000,
    "dialogues": 8_000_000,
}
LARGE = ("novels", "science_fiction", "short_stories", "synthetic")  # streams of `base` alone
HELD_OUT_DIALOGUES = 200
EXCHANGE = "<|im_start|>user\n"


def prepare(data: Path, out: Path, limit: int | None = None, vocab_size: int = VOCAB_SIZE) -> str:
    """Write both packs to `out`; returns a table of what they hold.

    limit: keep so many documents of each source. `out`/synthetic.txt, if `synthesize` wrote one,
    becomes a stream too.
    """
    training, held_out = split(_first(read_texts(data), limit))
    talks = list(_conversations(data, training["tinystories"], limit))
    # no small talk: the vocabulary is older, and models that were trained with it should go on
    taught = [c for c in talks if not c.held_out and c.kind != "small_talk"]
    learned = [render(c.messages, c.tools) for c in taught]
    tokenizer = train_tokenizer(_vocabulary_texts(training, learned), vocab_size)
    synthetic = out / "synthetic.txt"
    if synthetic.exists():
        stories = synthetic.read_text(encoding="utf-8").split(END_OF_TEXT)
        training["synthetic"] = [s.strip() for s in stories if s.strip()]
    sizes: dict[str, tuple[int, int]] = {}
    packs = {name: PackWriter(out / name) for name in PACKS}
    large, small = packs.values()
    small.add_text("tokenizer.json", tokenizer.to_str())
    for name, texts in sorted(training.items()):
        stream = tokenize(tokenizer, texts)
        pack = large if name in LARGE else small
        pack.add_stream(name, stream)
        sizes[name] = len(stream.tokens), stream.bytes
    for kind in sorted({c.kind for c in talks}):
        texts = [render(c.messages, c.tools) for c in talks if c.kind == kind and not c.held_out]
        examples = tokenize_replies(tokenizer, texts, CONTEXT)
        small.add_examples(kind, examples)
        sizes[kind] = len(examples.tokens), sum(len(t.encode()) for t in texts)
    for name, texts in sorted(held_out.items()):
        small.add_text(f"held_out/{name}.txt", f"\n{END_OF_TEXT}\n".join(texts))
    _add_held_out_dialogues(small, talks)
    small.add_text("manifest.json", json.dumps(sizes, indent=1))
    return describe(sizes, {name: pack.close() for name, pack in packs.items()})


def _first(documents: Iterable[Document], limit: int | None) -> Iterable[Document]:
    """The first `limit` documents of each source, and as many held-out ones."""
    counts: dict[tuple[str, bool], int] = {}
    for document in documents:
        key = document.source, document.held_out
        counts[key] = counts.get(key, 0) + 1
        if limit is None or counts[key] <= limit:
            yield document


def split(documents: Iterable[Document]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(Training texts, held-out texts) by source, without what repeats."""
    held_out: dict[str, list[str]] = {}
    rest: list[Document] = []
    filtered = Deduplicator()
    for document in documents:
        if not document.held_out:
            rest.append(document)
        # the source lists some stories twice
        elif filtered.held_out.share(document.text) <= filtered.limit:
            filtered.held_out.add(document.text)
            held_out.setdefault(document.source, []).append(document.text)
    training: dict[str, list[str]] = {}
    for document in rest:
        if text := filtered.keep(document.text):
            training.setdefault(document.source, []).append(text)
    return training, held_out


def _conversations(data: Path, stories: list[str], limit: int | None) -> Iterable[Conversation]:
    """All conversations, each text once, in an order that mixes services."""
    counts: dict[tuple[str, bool], int] = {}
    groups = read_dialogues(data), read_instructions(data), story_requests(stories), small_talk()
    for group in groups:
        found = {c.identity: c for c in group}
        for identity in sorted(found, key=digest):
            conversation = found[identity]
            key = conversation.kind, conversation.held_out
            counts[key] = counts.get(key, 0) + 1
            if limit is None or counts[key] <= limit:
                yield conversation


def _vocabulary_texts(training: dict[str, list[str]], dialogues: list[str]) -> Iterable[str]:
    for name, texts in sorted((training | {"dialogues": dialogues}).items()):
        left = VOCABULARY_BYTES.get(name, 0)
        for text in sorted(texts, key=digest):
            if left <= 0:
                break
            yield text[:left]
            left -= len(text)


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> Stream:
    """One stream of all texts, each opened by <|endoftext|>."""
    parts = [
        np.array(encoding.ids, np.uint16)
        for start in range(0, len(texts), 64)
        for encoding in tokenizer.encode_batch(texts[start : start + 64])
    ]
    return Stream(np.concatenate(parts), sum(len(text.encode()) for text in texts))


def _add_held_out_dialogues(pack: PackWriter, talks: list[Conversation]) -> None:
    """Dialogues of trained services and of others, as conversations and as text."""
    held = [c for c in talks if c.held_out and c.tools]
    groups = {
        "dialogues": [c for c in held if not c.services & HELD_OUT_SERVICES],
        "unseen_services": [c for c in held if c.services & HELD_OUT_SERVICES],
    }
    for name, group in groups.items():
        kept = group[:HELD_OUT_DIALOGUES]
        lines = [json.dumps(c.as_dict(), ensure_ascii=False) for c in kept]
        pack.add_text(f"held_out/{name}.jsonl", "\n".join(lines) + "\n")
        # `render` opens each with <|endoftext|>, which parts them
        pack.add_text(f"held_out/{name}.txt", "".join(render(c.messages, c.tools) for c in kept))
    talk = [
        render([m for m in c.messages if m["role"] != "tool" and m["content"]])
        for c in groups["dialogues"][:HELD_OUT_DIALOGUES]
    ]
    pack.add_text("held_out/talk.txt", "".join(talk))

"""From raw text to packed token arrays: clean, deduplicate, hold out, tokenize.

Three streams come out: `stories` (TinyStories), `chat` (the same stories as the answer to a
request) and `tales` (the plainest passages of public-domain short stories).
"""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.stories.tokenizer import render_chat
from recipes.stories.truecase import Truecaser

HELD_OUT_PERCENT = 2
PASSAGE_CHARS = 1500  # tales are long: cut them into pieces about as long as a story
TALES_BYTES = 8_000_000  # how much of the plainest text to keep
ENDED = re.compile(r"[.!?][\"')]*$")
WORD = re.compile(r"[A-Za-z']+")
# A singular noun ends its phrase: what follows is punctuation or a verb or preposition.
NOUN = re.compile(
    r"\b(?:the|a|an) ([a-z]{2,}[a-rt-z])"
    r"(?=[.,!?]| (?:was|is|and|had|saw|said|in|on|to|with|that|who)\b)"
)
TYPOGRAPHY = {
    # UTF-8 read as Windows-1252; the longest first, a bare one is a closing quote.
    "\u00e2\u20ac\u0153": '"',
    "\u00e2\u20ac\u2122": "'",
    "\u00e2\u20ac\u02dc": "'",
    "\u00e2\u20ac\u201c": "-",
    "\u00e2\u20ac\u201d": " - ",
    "\u00e2\u20ac": '"',
    # quotation marks, apostrophes, dashes
    **dict.fromkeys("\u201c\u201d\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2018\u2019", "'"),
    "\u2013": "-",
    "\u2014": " - ",
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Cleaned documents by stream; the held-out ones share no text with the others."""

    stories: list[str]
    tales: list[str]
    held_out: list[str]  # TinyStories, cased in the source
    held_out_recased: list[str]  # TinyStories, lower-cased in the source, casing restored here


def clean(text: str) -> str:
    """Plain quotes and dashes, one newline between paragraphs, no stray spaces."""
    for found, plain in TYPOGRAPHY.items():
        text = text.replace(found, plain)
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    return re.sub(r" *\n\s*", "\n", text).strip()


def is_held_out(text: str) -> bool:
    """Whether a document belongs to the evaluation, decided by its own letters alone."""
    digest = hashlib.sha256(fingerprint(text).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def fingerprint(text: str) -> str:
    """The letters of a text, so that case, quotes and line breaks do not hide a duplicate."""
    return re.sub(r"[^a-z]", "", text.lower())


def deduplicate(documents: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Drop documents whose letters, or whose first or last 150 letters, were seen before."""
    for document in documents:
        letters = fingerprint(document)
        keys = {letters, "start " + letters[:150], "end " + letters[-150:]}
        if letters and not keys & seen:
            seen |= keys
            yield document


def read_cased(path: Path) -> list[str]:
    """Stories between <|endoftext|> marks; unfinished ones are dropped."""
    documents = path.read_text(encoding="utf-8").split("<|endoftext|>")
    return [text for text in map(clean, documents) if ENDED.search(text)]


def read_lowercase(path: Path, truecaser: Truecaser) -> list[str]:
    """Stories on a line of their own, paragraphs between blank lines; casing is restored.

    The file cuts some stories in the middle, so fragments (short or unfinished) are dropped.
    """
    raw = re.split(r"(?<!\n)\n(?!\n)", path.read_text(encoding="utf-8"))[1:]
    documents = [clean(text) for text in raw]
    return [truecaser(text) for text in documents if len(text) >= 350 and ENDED.search(text)]


def read_tales(path: Path, known: set[str]) -> list[str]:
    """The passages with the largest share of words that TinyStories also uses."""
    scored: list[tuple[float, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        for passage in passages(json.loads(line)["text"]):
            words = [word.lower() for word in WORD.findall(passage)]
            if len(words) >= 100:
                scored.append((sum(word in known for word in words) / len(words), passage))
    scored.sort(reverse=True)
    kept: list[str] = []
    size = 0
    for _, passage in scored:
        size += len(passage.encode())
        if size > TALES_BYTES:
            break
        kept.append(passage)
    return kept


def passages(text: str) -> Iterator[str]:
    """Whole paragraphs, unwrapped, grouped to about PASSAGE_CHARS characters."""
    group: list[str] = []
    for wrapped in re.split(r"\n\s*\n", text):
        paragraph = clean(wrapped.replace("\n", " ").replace("_", ""))
        if not ENDED.search(paragraph):  # headings, rules, verse
            continue
        group.append(paragraph)
        if sum(map(len, group)) >= PASSAGE_CHARS:
            yield "\n".join(group)
            group = []


def load_corpus(data: Path, limit: int | None = None) -> Corpus:
    """Read every source under `data`; `limit` keeps the first so many documents of each."""
    seen: set[str] = set()
    cased = read_cased(data / "tinystories" / "train_2M.txt")
    truecaser = Truecaser.learn(cased)
    recased = read_lowercase(data / "tinystories" / "train_lowercase_tail.txt", truecaser)
    stories: list[str] = []
    held_out: list[str] = []
    held_out_recased: list[str] = []
    # Held-out documents first: a near copy of one is then dropped from the training side.
    for source, held in ((cased, held_out), (recased, held_out_recased)):
        held += deduplicate([text for text in source if is_held_out(text)], seen)
    for source in (cased, recased):
        training = [text for text in source if not is_held_out(text)]
        stories += list(deduplicate(training, seen))[:limit]
    counts = Counter(word.lower() for text in stories for word in WORD.findall(text))
    known = {word for word, count in counts.items() if count >= 3}
    tales = read_tales(data / "lcats_stories_train.jsonl", known)
    return Corpus(stories, list(deduplicate(tales, seen))[:limit], held_out, held_out_recased)


def chat_documents(stories: list[str], seed: int = 0) -> list[tuple[str, str]]:
    """Each story with a request it could answer: (what the user asks, the story).

    The subject is a name, or the rarest noun that the story uses twice after an article.
    """
    rng = random.Random(seed)
    nouns = [Counter(NOUN.findall(text)) for text in stories]
    spread = Counter(word for counter in nouns for word in counter)
    pairs: list[tuple[str, str]] = []
    for text, counter in zip(stories, nouns, strict=True):
        subjects = [word for word, count in counter.items() if count >= 2 and spread[word] >= 3]
        named = re.search(r"named ([A-Z][a-z]+)", text)
        ask = rng.choice(["Tell me a story", "Write a story", "Tell me a short story"])
        kind = rng.random()
        if named and kind < 0.3:
            ask += f" about {named[1]}"
        elif subjects and kind < 0.8:
            subject = min(subjects, key=lambda word: spread[word])
            ask += f" about {'an' if subject[0] in 'aeiou' else 'a'} {subject}"
        pairs.append((ask + rng.choice([".", ".", ", please.", ""]), text))
    return pairs


@dataclass(frozen=True, slots=True)
class Packed:
    """Token ids of many documents in one array; document i is ids[offsets[i]:offsets[i + 1]]."""

    ids: NDArray[np.uint16]
    offsets: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write both arrays to one .npz file."""
        np.savez(path, ids=self.ids, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path) -> "Packed":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["offsets"])


def pack(tokenizer: Tokenizer, documents: list[str], bos: bool = True) -> Packed:
    """Encode documents, each opened by the tokenizer's own <|endoftext|> when `bos` is set."""
    encoded = [e.ids for e in tokenizer.encode_batch(documents, add_special_tokens=bos)]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return Packed(np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoded]), offsets)


def prepare(corpus: Corpus, tokenizer: Tokenizer, out: Path) -> dict[str, int]:
    """Pack every stream into `out`/<stream>.npz; returns the tokens of each."""
    chat = [render_chat(ask, story) for ask, story in chat_documents(corpus.stories)]
    streams = {
        "stories": pack(tokenizer, corpus.stories),
        "chat": pack(tokenizer, chat, bos=False),
        "tales": pack(tokenizer, corpus.tales),
        "held_out": pack(tokenizer, corpus.held_out),
        "held_out_recased": pack(tokenizer, corpus.held_out_recased),
    }
    for name, packed in streams.items():
        packed.save(out / f"{name}.npz")
    (out / "held_out.json").write_text(
        json.dumps({"cased": corpus.held_out, "recased": corpus.held_out_recased})
    )
    return {name: len(packed.ids) for name, packed in streams.items()}

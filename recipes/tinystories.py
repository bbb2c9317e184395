"""TinyStories as they are found: cleaned, their capitals restored, and what each could answer."""

import random
import re
from collections import Counter
from pathlib import Path

from recipes.truecase import Truecaser

SHORTEST = 350  # characters; the file of lower-cased stories cuts some in the middle
ENDED = re.compile(r"[.!?][\"')]*$")
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


def clean(text: str) -> str:
    """Plain quotes and dashes, one newline between paragraphs, no stray spaces."""
    for found, plain in TYPOGRAPHY.items():
        text = text.replace(found, plain)
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    return re.sub(r" *\n\s*", "\n", text).strip()


def read_lowercase(path: Path, truecaser: Truecaser) -> list[str]:
    """Stories on a line of their own, paragraphs between blank lines; casing is restored.

    Fragments, short or unfinished, are dropped.
    """
    raw = re.split(r"(?<!\n)\n(?!\n)", path.read_text(encoding="utf-8"))[1:]
    documents = [clean(text) for text in raw]
    return [truecaser(text) for text in documents if len(text) >= SHORTEST and ENDED.search(text)]


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

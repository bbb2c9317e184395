"""Where the text comes from, under which licence, and how each source is read.

Nothing here is copied into the project: the texts lie in a data folder beside it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.cleaning import clean_novel, digest, is_held_out, tidy, unwrap
from recipes.tinystories import ENDED, read_lowercase
from recipes.truecase import Truecaser

LICENCES = {
    "TinyStories (Eldan & Li 2023)": "CDLA-Sharing-1.0",
    "LCATS short stories (Project Gutenberg)": "public domain",
    "100 English novels (computationalstylistics/100_english_novels)": "public domain",
    "NLTK's Gutenberg selection": "public domain",
    "Schema-Guided Dialogue (Rastogi et al. 2020)": "CC BY-SA 4.0",
    "Self-Instruct's seed tasks (Wang et al. 2023)": "Apache-2.0",
    "chatterbot-corpus": "BSD-3-Clause",
    "small talk written for this project": "Apache-2.0",
    "tinyshakespeare": "public domain",
}
"""Every source and its licence, for the model cards."""

SHARE_ALIKE = (
    "TinyStories is under CDLA-Sharing-1.0; the Schema-Guided Dialogue data is under CC BY-SA 4.0. "
    "Copyright of the dialogues: Google LLC and its contributors. The dialogues were converted to "
    "messages with tool calls."
)

PROSE = (
    *("austen-emma", "austen-persuasion", "austen-sense", "bryant-stories", "burgess-busterbrown"),
    *("carroll-alice", "chesterton-ball", "chesterton-brown", "edgeworth-parents"),
    "melville-moby_dick",
)
"""Of NLTK's selection: no verse, and no Shakespeare, whose styles adapters learn."""
VERSE = ("blake-poems", "milton-paradise", "whitman-leaves")

SPACE = re.compile(
    r"\b(?:space ?ships?|rockets?|martians?|planets?|planetary|mars|venus|venusians?|robots?|galaxy"
    r"|galactic|earthm[ae]n|spacem[ae]n|asteroids?|aliens?|hyperspace|interstellar|solar system)\b",
    re.IGNORECASE,
)
SCIENCE_FICTION_DENSITY = 3.0  # words of SPACE in 10,000 characters
WRAPPED_SHARE = 4  # one short story in four keeps the line breaks that it was typed with
TINYSTORIES_PERCENT, SHORT_STORIES_PERCENT, SCIENCE_FICTION_PERCENT = 5, 2, 4
STYLE_HELD_OUT = 0.1  # the end of each file that an adapter learns
CONTINUED = re.compile(r"\n {4,}(?=\S)")  # a verse longer than the line


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a source."""

    source: str
    identity: str  # decides whether it is held out
    text: str
    held_out: bool = False


def letters(text: str) -> str:
    """What identifies a story: case, quotes and line breaks don't."""
    return re.sub(r"[^a-z]", "", text.lower())


def read_tinystories(folder: Path) -> Iterator[Document]:
    """Stories as they are; those that were lower-cased in the source get their capitals back."""
    whole = (folder / "tinystories" / "train_2M.txt").read_text(encoding="utf-8")
    cased = [text for text in map(tidy, whole.split("<|endoftext|>")) if ENDED.search(text)]
    tail = folder / "tinystories" / "train_lowercase_tail.txt"
    recased = read_lowercase(tail, Truecaser.learn(cased))
    for text in cased:
        held = is_held_out(letters(text), TINYSTORIES_PERCENT)
        yield Document("tinystories", letters(text), text, held)
    for text in recased:
        # never held out: their capitals are a guess
        yield Document("tinystories", letters(text), text)


def read_short_stories(folder: Path) -> Iterator[Document]:
    """Short stories; those of science fiction are a source of their own.

    A held-out story keeps its lines: bits per byte should count the bytes that others see too.
    """
    lines = (folder / "lcats_stories_train.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        entry = json.loads(line)
        text = tidy(entry["text"])
        density = 1e4 * len(SPACE.findall(text)) / max(1, len(text))
        fiction = density >= SCIENCE_FICTION_DENSITY
        source = "science_fiction" if fiction else "short_stories"
        percent = SCIENCE_FICTION_PERCENT if fiction else SHORT_STORIES_PERCENT
        identity = f"{entry['corpus']} {entry['name']}"
        held = is_held_out(identity, percent)
        as_typed = not fiction and (held or digest("wrapped " + identity) % WRAPPED_SHARE == 0)
        yield Document(source, identity, text if as_typed else unwrap(text), held)


def read_novels(folder: Path) -> Iterator[Document]:
    """Novels, unwrapped; none is held out."""
    for file in sorted((folder / "100_english_novels").glob("*.txt")):
        text = clean_novel(file.read_text(encoding="utf-8", errors="replace"))
        yield Document("novels", file.stem, text)
    for name in PROSE:
        file = folder / "nltk-gutenberg" / f"{name}.txt"
        if file.exists():
            text = clean_novel(file.read_text(encoding="utf-8", errors="replace"))
            yield Document("novels", file.stem, text)


def read_shakespeare(folder: Path) -> Iterator[Document]:
    """Two documents: what trains the adapter, and the plays' last tenth."""
    whole = tidy((folder / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8"))
    yield from _parted("shakespeare", "tinyshakespeare", whole)


def read_verse(folder: Path) -> Iterator[Document]:
    """The same of each book of verse; its lines are kept, and no space begins them."""
    for name in VERSE:
        text = (folder / "nltk-gutenberg" / f"{name}.txt").read_text(encoding="utf-8")
        _, _, text = tidy(text).partition("\n")  # what the file calls itself
        lines = [line.strip(" }") for line in CONTINUED.sub(" ", text).split("\n")]
        lines = [line for line in lines if not line.startswith("[")]  # numbers of books
        yield from _parted("verse", name, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip())


def _parted(source: str, name: str, whole: str) -> Iterator[Document]:
    cut = whole.index("\n\n", int(len(whole) * (1 - STYLE_HELD_OUT)))
    yield Document(source, name, whole[:cut])
    yield Document(source, f"{name}, the end", whole[cut:].strip(), held_out=True)


def read_texts(folder: Path) -> Iterator[Document]:
    """Every document that isn't a dialogue."""
    yield from read_tinystories(folder)
    yield from read_short_stories(folder)
    yield from read_novels(folder)
    yield from read_shakespeare(folder)
    yield from read_verse(folder)

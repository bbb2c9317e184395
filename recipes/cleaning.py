"""Plain text out of books that were typed to a line length: lines joined, artefacts removed."""

import hashlib
import itertools
import re

BLANK_LINE = re.compile(r"\n[ \t]*\n\s*")
SPACES = re.compile(r"[ \t\u00a0]+")
BEFORE_PUNCTUATION = re.compile(r" +([,.;:!?])(?=[\s\"']|$)")
RULE = re.compile(r"[\W_]*$")
VERSE_WIDTH = 52  # characters: a wrapped line of prose is longer


def tidy(text: str) -> str:
    """One kind of line end, no byte order mark, no control characters, no space at a line's end."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    return re.sub(r"[ \t]+\n", "\n", text).strip()


def unwrap(text: str) -> str:
    """Join the lines of each paragraph; paragraphs stay parted by a blank line.

    Verse keeps its lines. A word broken at a hyphen is joined with it: in these books lines break
    at hyphens that the word has anyway.
    """
    paragraphs = [_join(block) for block in BLANK_LINE.split(tidy(text))]
    return "\n\n".join(p for p in paragraphs if not RULE.match(p))


def _join(block: str) -> str:
    lines = [SPACES.sub(" ", line).strip() for line in block.split("\n")]
    lines = [line for line in lines if line]
    if is_verse(lines):
        return "\n".join(lines)
    pieces = lines[:1]
    for before, line in itertools.pairwise(lines):
        broken = before[-2:-1].isalnum() and before[-1] == "-" and line[0].isalnum()
        pieces.append(line if broken else " " + line)
    return "".join(pieces)


def is_verse(lines: list[str]) -> bool:
    """Three short lines or more, each starting with a capital."""
    short = len(lines) >= 3 and max(map(len, lines)) < VERSE_WIDTH
    capital = re.compile(r"[\"'“‘(_]*[A-Z]")
    return short and sum(bool(capital.match(x)) for x in lines) >= 0.8 * len(lines)


def clean_novel(text: str) -> str:
    """Unwrap a novel and close the gaps that removed mark-up left (`don't  know`, `it , and`)."""
    return BEFORE_PUNCTUATION.sub(r"\1", unwrap(text))


def digest(text: str) -> int:
    """A number that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(identity: str, percent: float) -> bool:
    """Whether a document belongs to the evaluation, decided by its identity alone."""
    return digest("held out " + identity) % 10_000 < 100 * percent

"""How a vocabulary's pieces stand for bytes.

Vocabularies write bytes in two ways: byte-level BPE maps each byte to a printable character
("Ġ" is a space), SentencePiece writes "▁" for a space and "<0xE2>" for a byte that is no piece of
its own. Either way a token's bytes don't depend on its neighbours, so text is the UTF-8 decoding
of concatenated bytes, and streaming needs neither windows nor repeated decoding. The one exception
is the leading space SentencePiece puts before a text: it is dropped at the start of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import TokenizerError

SPACE_SYMBOL = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What the `tokenizers` library's WordPiece clean-up does to each word.
_WORD_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True, slots=True)
class PieceRule:
    """`to_bytes` turns a piece into its bytes; a text's first space is dropped if so marked."""

    to_bytes: Callable[[str], bytes]
    strip_leading_space: bool


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: {"Ġ": 32, "!": 33, …}."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece; one with a foreign character stands for its own text."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: "▁" is a space, "<0xE2>" one byte."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(SPACE_SYMBOL, " ").encode()


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule:
    """The rule that a `tokenizer.json`'s `decoder` section describes.

    Raises `TokenizerError` for a decoder whose text isn't a concatenation of per-token bytes.
    """
    if decoder is None:  # the library joins the pieces with spaces
        return PieceRule(lambda piece: b" " + piece.encode(), strip_leading_space=True)
    steps = list(_flatten(decoder))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceRule(byte_level_bytes, strip_leading_space=False)
    if [step["type"] for step in steps] == ["WordPiece"]:
        return PieceRule(_word_piece(steps[0]), strip_leading_space=True)
    return _chain_rule(steps)


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _chain_rule(steps: list[Mapping[str, Any]]) -> PieceRule:
    """SentencePiece-like chains: [Replace ▁, ByteFallback, Fuse, Strip], [Metaspace], …"""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = strip = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not fused
            ):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                strip = True
            case {"type": "Metaspace", "replacement": str(symbol)} if not fused:
                replacements.append((symbol, " "))
                strip = strip or step.get("prepend_scheme", "always") != "never"
            case _:
                raise TokenizerError(
                    f"tokenizer.json's decoder has the step {dict(step)!r}, which can't be "
                    f"streamed token by token. Built are ByteLevel, WordPiece, and chains of "
                    f"Replace, ByteFallback, Fuse, Strip and Metaspace."
                )

    def to_bytes(piece: str) -> bytes:
        if byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return PieceRule(to_bytes, strip_leading_space=strip)


def _word_piece(step: Mapping[str, Any]) -> Callable[[str], bytes]:
    prefix, cleanup = str(step.get("prefix", "##")), bool(step.get("cleanup", True))

    def to_bytes(piece: str) -> bytes:
        text = piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece
        if cleanup:
            for old, new in _WORD_CLEANUP:
                text = text.replace(old, new)
        return text.encode()

    return to_bytes

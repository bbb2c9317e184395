"""Byte-level BPE from files other than `tokenizer.json`: vocab.json + merges.txt, and tiktoken.

Only families whose way of splitting text into words is known are built: the wrong pattern gives
plausible but wrong tokens.
Sources: Radford et al. 2019 (GPT-2), the Qwen2 and Llama 3 tokenizers as published.
"""

from __future__ import annotations

import base64
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from penstock.errors import TokenizerError, nearest
from penstock.tokenizer.backend import FastBackend
from penstock.tokenizer.pieces import byte_alphabet
from penstock.tokenizer.settings import TokenizerSettings, read_json, read_text

# GPT-2's own pattern is the default of the ByteLevel pre-tokenizer: None.
_PATTERNS: dict[str, str | None] = {
    "GPT2Tokenizer": None,
    "Qwen2Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen3_5Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_NFC_CLASSES = {"Qwen2Tokenizer", "Qwen3_5Tokenizer"}

_LLAMA3_RANKS = 128_000
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama 3.1's names. Llama 3.0's file is the same one; there ids 128004, 128005, 128008, 128010
# and 128011 are reserved and never used, so only their names differ.
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(2, 246)),
)


def load_vocab_and_merges(folder: Path, settings: TokenizerSettings) -> FastBackend:
    """A byte-level BPE from `vocab.json` and `merges.txt`."""
    tokenizer_class = settings.tokenizer_class or ""
    if tokenizer_class not in _PATTERNS:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt, but the tokenizer_class "
            f"{settings.tokenizer_class!r} isn't one whose word pattern is known: "
            f"{', '.join(_PATTERNS)}.{nearest(tokenizer_class, _PATTERNS)} Save it as "
            f"tokenizer.json with transformers (AutoTokenizer…save_pretrained)."
        )
    vocabulary = read_json(folder / "vocab.json")
    merges = _read_merges(folder / "merges.txt")
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception and TypeError
        raise TokenizerError(
            f"{folder}: vocab.json ({len(vocabulary):,} entries) and merges.txt "
            f"({len(merges):,} merges) don't make a BPE: {error}. Download both again."
        ) from error
    if tokenizer_class in _NFC_CLASSES:
        tokenizer.normalizer = normalizers.NFC()
    _set_pattern(tokenizer, _PATTERNS[tokenizer_class], bool(settings.add_prefix_space))
    return FastBackend(tokenizer)


def load_tiktoken(path: Path) -> FastBackend:
    """Llama 3's `tokenizer.model` as Meta published it: a line "base64 rank" per token."""
    ranks = _read_ranks(path)
    if len(ranks) != _LLAMA3_RANKS:
        raise TokenizerError(
            f"{path} is a tiktoken file with {len(ranks):,} ranks; the only one whose word "
            f"pattern and special tokens are known is Llama 3's, with {_LLAMA3_RANKS:,}. Save it "
            f"as tokenizer.json with transformers (AutoTokenizer…save_pretrained)."
        )
    vocabulary, merges = _bpe_from_ranks(ranks)
    tokenizer = tokenizers.Tokenizer(
        # tiktoken takes a word that is itself a token whole, without merging up to it.
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    )
    _set_pattern(tokenizer, _LLAMA3_PATTERN, add_prefix_space=False)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(content, normalized=False) for content in _LLAMA3_SPECIAL]
    )
    return FastBackend(
        tokenizer,
        default_tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        adds_bos_token=True,
    )


def looks_like_tiktoken(path: Path) -> bool:
    """Whether the file starts with a "base64 rank" line, as no SentencePiece model does."""
    with path.open("rb") as file:
        first = file.read(4096).split(b"\n", 1)[0].split()
    try:
        token, rank = first
        return bool(base64.b64decode(token, validate=True)) and int(rank) >= 0
    except ValueError:  # not two words, not base64, not an integer
        return False


def _set_pattern(
    tokenizer: tokenizers.Tokenizer, pattern: str | None, add_prefix_space: bool
) -> None:
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    # Not splitlines(): pieces may hold U+0085 or U+2028, which it takes for line ends.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.partition(" ")
        if not separator or not right or " " in right:
            raise TokenizerError(
                f"{path}, line {number}: {line!r} isn't two pieces with a space between. "
                f"Download the file again."
            )
        merges.append((left, right))
    return merges


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(
                f"{path}, line {number}: {line[:60]!r} isn't 'base64 rank' ({error}). "
                f"The file may be truncated: download it again."
            ) from error
    return ranks


def _bpe_from_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merge list that make BPE join the same pairs as tiktoken.

    tiktoken joins the neighbours whose concatenation has the lowest rank, so every split of a
    token into two tokens is a merge, in the order of the token's rank.
    """
    character = {byte: char for char, byte in byte_alphabet().items()}
    spelled = {token: "".join(map(character.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [
            (token[:index], token[index:])
            for index in range(1, len(token))
            if token[:index] in ranks and token[index:] in ranks
        ]
        splits.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges.extend((spelled[left], spelled[right]) for left, right in splits)
    return {spelled[token]: rank for token, rank in ranks.items()}, merges

"""What `Tokenizer` asks of the library that does the work, and the backend over `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from penstock.errors import TokenizerError
from penstock.tokenizer.pieces import PieceRule, piece_rule
from penstock.tokenizer.settings import AddedToken, TokenizerSettings, read_text

PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)
"""What isn't the fault of a file or a text.

Else the tokenizers library raises bare Exceptions, and panics, which are BaseExceptions.
"""


_LONG = 10_000
"""Characters of a text during which other threads should go on: `encode` holds Python's lock."""


class Backend(Protocol):
    """A vocabulary with its algorithm: text to ids, and ids to pieces and bytes."""

    @property
    def size(self) -> int:
        """The highest id it can produce, plus one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that steer the model and aren't text."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to the vocabulary, or are cut out of a text before it."""

    @property
    def adds_tokens(self) -> bool:
        """Whether `encode` itself puts special tokens around a text."""

    @property
    def default_tokens(self) -> Mapping[str, str]:
        """Named tokens that the vocabulary itself knows ("bos_token": "<s>")."""

    @property
    def adds_bos_token(self) -> bool | None:
        """Whether BOS goes first if no file says so; None: `encode` itself knows."""

    @property
    def strip_leading_space(self) -> bool:
        """Whether a text's first space is only the vocabulary's word marker."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written out in the text become single ids."""

    def id_to_token(self, token_id: int) -> str | None:
        """The raw piece, or None where the vocabulary has a gap."""

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this piece."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for; empty where the vocabulary has a gap."""


class FastBackend:
    """A tokenizer of the `tokenizers` library: `tokenizer.json`, or BPE built of other files."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        default_tokens: Mapping[str, str] | None = None,
        adds_bos_token: bool | None = None,
    ) -> None:
        # Padding and truncation baked into the file would silently change or drop prompt tokens.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._rule = _decoder_rule(tokenizer)
        self.default_tokens = default_tokens or {}
        self.adds_bos_token = adds_bos_token
        self._refresh()

    @classmethod
    def from_json(cls, path: Path) -> FastBackend:
        """Load a `tokenizer.json`."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except PASSED_ON:
            raise
        except BaseException as error:
            raise TokenizerError(
                f"{path} isn't a tokenizer that tokenizers {tokenizers.__version__} can read "
                f"({error}; the file has {path.stat().st_size:,} bytes). It may be truncated or "
                f"made by a newer release: download it again, or upgrade tokenizers."
            ) from error
        _check_added_ids(path, tokenizer)
        return cls(tokenizer)

    @property
    def strip_leading_space(self) -> bool:
        """Whether a text's first space is only the vocabulary's word marker."""
        return self._rule.strip_leading_space

    @property
    def adds_tokens(self) -> bool:
        """Whether the post-processor puts tokens around a text."""
        return self._tokenizer.num_special_tokens_to_add(False) > 0

    def add_prefix_space(self, add: bool) -> None:
        """Put a space before a text that has none, or don't; of byte-level words only."""
        words = self._tokenizer.pre_tokenizer
        if isinstance(words, tokenizers.pre_tokenizers.ByteLevel):
            words.add_prefix_space = add
            self._tokenizer.pre_tokenizer = words

    def add_tokens(self, added: Mapping[int, AddedToken], source: str) -> None:
        """Add the tokens of the file `source` that the vocabulary lacks or flags differently."""
        present = self._tokenizer.get_added_tokens_decoder()
        missing = [
            tokenizers.AddedToken(
                token.content,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
            )
            for token_id, token in sorted(added.items())
            if not _same(present.get(token_id), token)
        ]
        self._tokenizer.add_tokens(missing)
        for token_id, token in added.items():
            actual = self._tokenizer.token_to_id(token.content)
            if actual != token_id:
                raise TokenizerError(
                    f"{source} gives {token.content!r} the id {token_id}, but in the "
                    f"vocabulary it has {actual}. The two files belong to different tokenizers: "
                    f"download the folder again."
                )
        self._refresh()

    def mark_special(self, contents: Iterable[str]) -> None:
        """Treat these tokens, if the vocabulary has them, as special; other flags stay."""
        added = {t.content: t for t in self._tokenizer.get_added_tokens_decoder().values()}
        fresh = [
            _special(content, added.get(content))
            for content in contents
            if not (content in added and added[content].special)
            and self._tokenizer.token_to_id(content) is not None
        ]
        if fresh:
            self._tokenizer.add_special_tokens(fresh)
            self._refresh()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text."""
        try:
            if len(text) > _LONG:
                (found,) = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
                return found.ids
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except PASSED_ON:
            raise
        except BaseException as error:
            raise TokenizerError(
                f"tokenizers {tokenizers.__version__} can't encode a text of {len(text):,} "
                f"characters ({error}). The tokenizer lacks something that it refers to: download "
                "its files again, or convert them anew."
            ) from error

    def id_to_token(self, token_id: int) -> str | None:
        """The raw piece, or None where the vocabulary has a gap."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this piece."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for."""
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._rule.to_bytes(piece)

    def as_json(self) -> dict[str, Any]:
        """The whole of it, as in a `tokenizer.json`."""
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found

    def _refresh(self) -> None:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The count is no bound on the ids: vocabularies have gaps.
        self.size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)


def configure(backend: FastBackend, settings: TokenizerSettings) -> None:
    """Apply the folder's added and special tokens to a freshly loaded tokenizer."""
    if settings.added_tokens:
        backend.add_tokens(settings.added_tokens, settings.added_tokens_file)
    backend.mark_special(
        [
            *backend.default_tokens.values(),
            *settings.default_tokens.values(),
            *settings.named_tokens.values(),
            *settings.extra_special_tokens,
        ]
    )


def _decoder_rule(tokenizer: tokenizers.Tokenizer) -> PieceRule:
    if tokenizer.decoder is None:
        return piece_rule(None)
    # The pickled state is the decoder's JSON; serialising the whole tokenizer would take 100 ms.
    return piece_rule(json.loads(tokenizer.decoder.__getstate__()))


def _check_added_ids(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """The library numbers added tokens by itself, and silently, where the vocabulary has gaps."""
    text = read_text(path)
    match = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    if match is None:
        return
    # Only this list is parsed: the whole file can take a second.
    entries, _ = json.JSONDecoder().raw_decode(text, match.end())
    for entry in entries:
        actual = tokenizer.token_to_id(entry["content"])
        if actual != entry["id"]:
            raise TokenizerError(
                f"{path} gives {entry['content']!r} the id {entry['id']}, but the tokenizers "
                f"library numbers it {actual}: the vocabulary has gaps. Put the token into the "
                f"vocabulary of the model section too."
            )


def _special(content: str, added: tokenizers.AddedToken | None) -> tokenizers.AddedToken:
    """A token as a special one, with the flags that it has where it is an added one already."""
    if added is None:
        return tokenizers.AddedToken(content, special=True, normalized=False)
    return tokenizers.AddedToken(
        content,
        special=True,
        lstrip=added.lstrip,
        rstrip=added.rstrip,
        single_word=added.single_word,
        normalized=added.normalized,
    )


def _same(present: tokenizers.AddedToken | None, wanted: AddedToken) -> bool:
    return present is not None and (
        present.content,
        present.special,
        present.lstrip,
        present.rstrip,
        present.single_word,
        present.normalized,
    ) == (
        wanted.content,
        wanted.special,
        wanted.lstrip,
        wanted.rstrip,
        wanted.single_word,
        wanted.normalized,
    )

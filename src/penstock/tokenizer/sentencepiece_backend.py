"""The backend over the `sentencepiece` package, for folders that only have a `tokenizer.model`.

SentencePiece itself knows nothing of special tokens written out in a text, as chat templates
write them: the text is cut at them first. Each part is then a text of its own that gets a
word-start space, as Meta, Mistral and llama.cpp do it; if tokenizer_config.json says
`"legacy": false`, only a part at the very start does, as in `transformers`, and with
`"add_prefix_space": false` none does.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import MissingExtraError, TokenizerError
from penstock.tokenizer.pieces import sentencepiece_bytes
from penstock.tokenizer.settings import AddedToken, TokenizerSettings

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Protocol buffers merge by concatenation: this is the field normalizer_spec {add_dummy_prefix:
# false}, which appended to a model's bytes overrides that one setting.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceBackend:
    """A SentencePiece model and the added tokens of the folder it lies in."""

    adds_bos_token: bool | None
    adds_tokens = False  # `Tokenizer` adds BOS and EOS

    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self._model = path.read_bytes()
        self._processor = _load(path, self._model)
        self._pieces = self._processor.vocab_size()
        self._spaces = settings.add_prefix_space is not False
        self._space_after_cut = self._spaces and settings.legacy is not False
        self._added = dict(settings.added_tokens)
        self.added_ids = frozenset(self._added)
        self._added_file = settings.added_tokens_file
        self._check_added(path)
        self._added_ids = {token.content: token_id for token_id, token in self._added.items()}
        self.size = max([self._pieces, *(token_id + 1 for token_id in self._added)])
        self.default_tokens = self._own_tokens()
        self.adds_bos_token = "bos_token" in self.default_tokens
        self.special_ids = self._find_special(settings)
        self._cuts, self._cut_ids = self._cut_pattern()

    @property
    def strip_leading_space(self) -> bool:
        """Whether a text's first space is only the vocabulary's word marker."""
        return self._spaces and bool(self._processor.normalize("a").startswith("▁"))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text. (BOS and EOS are added by `Tokenizer`.)"""
        ids: list[int] = []
        position = 0
        for match in self._cuts.finditer(text) if self._cuts else ():
            ids.extend(self._encode_plain(text[position : match.start()], at_start=position == 0))
            ids.append(self._cut_ids[(match.lastindex or 0) - 1])
            position = match.end()
        ids.extend(self._encode_plain(text[position:], at_start=position == 0))
        return ids

    def id_to_token(self, token_id: int) -> str | None:
        """The raw piece, or None where there is none."""
        if token_id in self._added:
            return self._added[token_id].content
        if 0 <= token_id < self._pieces:
            return str(self._processor.id_to_piece(token_id))
        return None

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this piece."""
        if token in self._added_ids:
            return self._added_ids[token]
        token_id = int(self._processor.piece_to_id(token))
        # Unknown pieces come back as the id of <unk>.
        return token_id if self.id_to_token(token_id) == token else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for."""
        piece = self.id_to_token(token_id)
        return b"" if piece is None else sentencepiece_bytes(piece)

    @cached_property
    def _unprefixed(self) -> SentencePieceProcessor:
        """The same model without a space before the text; loaded when first needed."""
        return _load(Path("tokenizer.model"), self._model + _NO_DUMMY_PREFIX)

    def _encode_plain(self, text: str, *, at_start: bool) -> list[int]:
        if not text:
            return []
        spaced = (at_start and self._spaces) or self._space_after_cut
        processor = self._processor if spaced else self._unprefixed
        return list(processor.encode(text))

    def _own_tokens(self) -> dict[str, str]:
        """Named tokens that the model itself defines."""
        processor = self._processor
        ids = {
            "bos_token": processor.bos_id(),
            "eos_token": processor.eos_id(),
            "unk_token": processor.unk_id(),
            "pad_token": processor.pad_id(),
        }
        return {
            name: processor.id_to_piece(token_id) for name, token_id in ids.items() if token_id >= 0
        }

    def _find_special(self, settings: TokenizerSettings) -> frozenset[int]:
        special = {
            token_id
            for token_id in range(self._pieces)
            if self._processor.is_control(token_id) or self._processor.is_unknown(token_id)
        }
        special.update(token_id for token_id, token in self._added.items() if token.special)
        names = (*settings.named_tokens.values(), *settings.extra_special_tokens)
        special.update(found for name in names if (found := self.token_to_id(name)) is not None)
        return frozenset(special)

    def _check_added(self, path: Path) -> None:
        """Added tokens may rename control and unused pieces, but not ordinary text."""
        processor = self._processor
        for token_id, token in self._added.items():
            if token_id >= self._pieces:
                continue
            piece = processor.id_to_piece(token_id)
            renamable = (
                processor.is_control(token_id)
                or processor.is_unused(token_id)
                or processor.is_unknown(token_id)
            )
            if not renamable and piece != token.content:
                raise TokenizerError(
                    f"{self._added_file} gives {token.content!r} the id {token_id}, but in "
                    f"{path.name} that id is {piece!r}. The two files belong to different "
                    f"tokenizers: download the folder again."
                )

    def _cut_pattern(self) -> tuple[re.Pattern[str] | None, list[int]]:
        """The tokens to cut the text at: a pattern with one group for each, and their ids."""
        tokens = {
            token_id: AddedToken(self._processor.id_to_piece(token_id))
            for token_id in self.special_ids
            if token_id < self._pieces
        }
        tokens |= self._added
        # Alternatives are tried in order: the longest first makes the match the longest one.
        ordered = sorted(tokens.items(), key=lambda item: -len(item[1].content))
        spaces = {True: r"\s*", False: ""}
        alternatives = [
            f"({spaces[token.lstrip]}{re.escape(token.content)}{spaces[token.rstrip]})"
            for _, token in ordered
        ]
        pattern = re.compile("|".join(alternatives)) if alternatives else None
        return pattern, [token_id for token_id, _ in ordered]


def _load(path: Path, model: bytes) -> SentencePieceProcessor:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a SentencePiece model, and the sentencepiece package isn't installed. "
            "Get it (pip install sentencepiece), or put a tokenizer.json into the folder."
        ) from error
    try:
        if not model:  # which the package takes for "none given"
            raise RuntimeError("the file is empty")
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise TokenizerError(
            f"{path} isn't a SentencePiece model ({error}; the file has {len(model):,} bytes). "
            f"It may be truncated: download it again."
        ) from error

"""The tokenizer of a model folder.

Whatever files the folder has, text becomes ids by the library they were made for, and ids become
text by concatenating the tokens' bytes, which is the same for one token at a time and for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ChatTemplateError, InvalidPromptError, TokenizerError, listed
from penstock.tokenizer.backend import Backend, FastBackend, configure
from penstock.tokenizer.bpe import Bpe
from penstock.tokenizer.byte_level import (
    load_tiktoken,
    load_vocab_and_merges,
    looks_like_tiktoken,
)
from penstock.tokenizer.sentencepiece_backend import SentencePieceBackend
from penstock.tokenizer.settings import TokenizerSettings, read_settings
from penstock.tokenizer.vocab_map import VocabMap

if TYPE_CHECKING:
    from penstock.tokenizer.tool_calls import ToolCallForm

logger = logging.getLogger(__name__)

_PROBE = "It was 1 day."
"""A text that most tokenizers encode."""


class PieceTable(dict[int, bytes]):
    """Token id → bytes, filled on first use: a vocabulary of 150,000 costs nothing to open."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._compute(token_id)
        return value


class Tokenizer:
    """Text to token ids and back, with the model's own special tokens and chat templates."""

    def __init__(
        self, backend: Backend, settings: TokenizerSettings, *, name: str = "tokenizer"
    ) -> None:
        self._backend = backend
        self._name = name
        self._templates = dict(settings.chat_templates)
        known = {
            name: content
            for name, content in {**settings.default_tokens, **backend.default_tokens}.items()
            if backend.token_to_id(content) is not None
        }
        self._named_tokens = {**known, **settings.named_tokens}
        self.vocab_size: int = backend.size
        self.special_ids: frozenset[int] = backend.special_ids
        self.bos_token_id: int | None = self._named_id("bos_token")
        self.eos_token_id: int | None = self._named_id("eos_token")
        self.pad_token_id: int | None = self._named_id("pad_token")
        self.unk_token_id: int | None = self._named_id("unk_token")
        self.vocab_map: VocabMap | None = None  # of the model, where its vocabulary is reduced
        self._affixes = self._bos_and_eos(settings)
        self._settings = settings
        self._probe()
        self._pieces = PieceTable(self._compute_bytes)
        self._visible_pieces = PieceTable(
            lambda token_id: b"" if token_id in self.special_ids else self._pieces[token_id]
        )

    @classmethod
    def from_folder(cls, folder: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder.

        Looked for in this order: `tokenizer.json`, `tokenizer.model` (SentencePiece, or Llama 3's
        tiktoken form), `vocab.json` with `merges.txt`.

        With `vocab_size`, the model's, see `check_vocab_size`.
        Raises `TokenizerError`, or `MissingExtraError` where `sentencepiece` isn't installed.
        """
        folder = Path(folder)
        settings = read_settings(folder)
        tokenizer = cls(_load_backend(folder, settings), settings, name=str(folder))
        tokenizer.check_vocab_size(vocab_size)
        return tokenizer

    def check_vocab_size(self, vocab_size: int | None) -> None:
        """Hold this against a model of `vocab_size` ids.

        Added tokens beyond them, as Gemma 3's for images are, get a warning: `vocab_size` is then
        the model's, and texts with such a token still become its id. Raises `TokenizerError` where
        tokens of the vocabulary itself lie beyond.
        """
        if vocab_size is None or self.vocab_size <= vocab_size:
            return
        beyond = [i for i in range(vocab_size, self.vocab_size) if self.id_to_token(i) is not None]
        plain = [i for i in beyond if i not in self._backend.added_ids]
        if plain:
            raise TokenizerError(
                f"The tokenizer in {self._name} can produce the id {plain[-1]} "
                f"({self.id_to_token(plain[-1])!r}), but the model's vocabulary has "
                f"{vocab_size} ids. They belong to different models: use the tokenizer the model "
                f"came with."
            )
        self.vocab_size = vocab_size
        logger.warning(
            "The tokenizer in %s has %d added token(s) beyond the model's vocabulary of %d ids, "
            "the first of them %r (%d): prompts that hold one will be refused. If the model "
            "should know it, resize the embedding.",
            self._name, len(beyond), vocab_size, self.id_to_token(beyond[0]), beyond[0],
        )  # fmt: skip

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the folder has one."""
        return self._templates.get("default")

    @property
    def configuration(self) -> dict[str, Any]:
        """What `tokenizer_config.json` says, without paths; tokens as their texts, and all that are
        named.
        """
        written = {
            name: _texts(value)
            for name, value in self._settings.written.items()
            if not name.endswith("_file") and name != "name_or_path"
        }
        found = {**written, **self._named_tokens}
        if not found.get("tokenizer_class"):
            found["tokenizer_class"] = self._settings.tokenizer_class or "PreTrainedTokenizerFast"
        if self.chat_template is not None:
            found["chat_template"] = self.chat_template
        return found

    @property
    def strip_leading_space(self) -> bool:
        """Whether a decoded text's first space is only a word marker, and is dropped."""
        return self._backend.strip_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, by default with the BOS and EOS the model expects around them.

        A special token written out in the text ("<|im_end|>") becomes that token. With a
        `vocab_map`, tokens that the model lacks are written in others.
        """
        self._check_unicode(text)
        if self._affixes is None:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = self._backend.encode(text, add_special_tokens=False)
            if add_special_tokens:
                ids = [*self._affixes[0], *ids, *self._affixes[1]]
        return ids if self.vocab_map is None else self.vocab_map.write(ids, self.quoted)

    def quoted(self, token_id: int) -> str:
        """` ('the text')` of a token, for a message."""
        return f" ({self.decode([token_id], skip_special_tokens=False)!r})"

    def bpe(self) -> Bpe:
        """The vocabulary's merges and added tokens.

        Raises TokenizerError where it isn't BPE that knows bytes.
        """
        if not isinstance(self._backend, FastBackend):
            raise TokenizerError(
                f"{self._name} is a tokenizer.model without a tokenizer.json, whose merges aren't "
                "read. Convert it with transformers' AutoTokenizer(…).save_pretrained first."
            )
        return Bpe.from_json(self._backend.as_json(), self._name)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens; bytes that aren't UTF-8 become U+FFFD, as in `bytes.decode`.

        Ids between the tokenizer's and the model's vocabulary size (padding rows of the
        embedding) stand for nothing.
        """
        table = self.piece_table(skip_special_tokens=skip_special_tokens)
        data = b"".join(map(table.__getitem__, ids))
        if self.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The raw piece ("Ġthe", "▁the", "<0x0A>"), or None where the vocabulary has none."""
        known = 0 <= token_id < self._backend.size
        return self._backend.id_to_token(int(token_id)) if known else None

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this piece, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token stands for; a special token's are those of its name."""
        return self._pieces[token_id]

    def piece_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Token id → bytes for `decode` and the detokenizer; shared, so not to be changed."""
        return self._visible_pieces if skip_special_tokens else self._pieces

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as one prompt, written by the model's template.

        A content that the template would leave out for its form (a text where it reads parts, or
        the other way) is given to it in the other one.
        `chat_template` is a template's source or the name of one of the folder's templates.
        Encode the result with `add_special_tokens=False`: templates write BOS themselves.
        """
        from penstock.tokenizer.chat import fit_contents, render_chat  # and jinja2, 0.1 s

        template = self._template(chat_template, has_tools=tools is not None)
        return render_chat(
            template,
            fit_contents(template, messages),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._named_tokens, **kwargs},
        )

    def template_source(
        self, chat_template: str | None = None, *, has_tools: bool = False
    ) -> str | None:
        """The template, chosen as in `apply_chat_template`; None where there is none."""
        try:
            return self._template(chat_template, has_tools=has_tools)
        except ChatTemplateError:
            return None

    def template_variables(self, chat_template: str | None = None) -> frozenset[str]:
        """The names that the template, chosen as in `apply_chat_template`, may look up."""
        from penstock.tokenizer.chat import template_variables

        return template_variables(self._template(chat_template, has_tools=False))

    def tool_call_form(
        self, chat_template: str | None = None, *, has_tools: bool = False
    ) -> ToolCallForm:
        """How the template, chosen as in `apply_chat_template`, wants earlier tool calls."""
        from penstock.tokenizer.tool_calls import tool_call_form

        return tool_call_form(self._template(chat_template, has_tools=has_tools))

    def _template(self, chosen: str | None, *, has_tools: bool) -> str:
        templates = self._templates
        if chosen is not None:
            return templates.get(chosen, chosen)
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        if templates:
            raise ChatTemplateError(
                f"{self._name} has {len(templates)} chat templates and none is the default: "
                f"{', '.join(sorted(templates))}. Pass one of these names as chat_template."
            )
        raise ChatTemplateError(
            f"{self._name} has no chat template (looked in tokenizer_config.json, "
            f"chat_template.jinja and chat_template.json, or a GGUF file's metadata). It may be a "
            f"base model: send a plain prompt, or pass a chat_template."
        )

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise TokenizerError(
                f"Token id {token_id} is negative; ids go from 0 to {self.vocab_size - 1}."
            )
        return self._backend.token_bytes(int(token_id)) if token_id < self._backend.size else b""

    def _named_id(self, name: str) -> int | None:
        content = self._named_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    def _bos_and_eos(self, settings: TokenizerSettings) -> tuple[list[int], list[int]] | None:
        """Ids to put before and after a text; None if the backend's own file says so.

        As in transformers 5, a `tokenizer.json` that adds tokens is taken as it is. For one that
        adds none, the flags count, as they did in transformers 4.
        """
        if self._backend.adds_tokens:
            return None
        add_bos, add_eos = settings.add_bos_token, settings.add_eos_token
        if add_bos is None and add_eos is None and self._backend.adds_bos_token is None:
            return None
        if add_bos is None:
            add_bos = bool(self._backend.adds_bos_token)
        before, after = [], []
        if add_bos:
            before = [self._required_id("bos_token", self.bos_token_id)]
        if add_eos:
            after = [self._required_id("eos_token", self.eos_token_id)]
        return before, after

    def _required_id(self, name: str, token_id: int | None) -> int:
        if token_id is None:
            content = self._named_tokens.get(name)
            what = "isn't given" if content is None else f"{content!r} isn't in the vocabulary"
            raise TokenizerError(
                f"{self._name}: tokenizer_config.json asks for add_{name}, but {name} {what} "
                f"({self.vocab_size} ids). Correct tokenizer_config.json, or add the token to the "
                f"vocabulary."
            )
        return token_id

    def _probe(self) -> None:
        """Encode some text: what a file refers to and lacks shows only then."""
        try:
            self._backend.encode(_PROBE, add_special_tokens=True)
        except TokenizerError as error:
            if isinstance(error.__cause__, Exception):
                return  # not a panic: it hasn't these letters, and may have others
            raise TokenizerError(f"{self._name}, tried with {_PROBE!r}: {error}") from error

    def _check_unicode(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            if 0xDC80 <= code <= 0xDCFF:  # a byte that Python kept as such
                raise InvalidPromptError(
                    f"The text isn't UTF-8: it has the byte {code - 0xDC00:#04x} at character "
                    f"{error.start} of {len(text)}. Write it in UTF-8, or replace it with U+FFFD."
                ) from error
            raise InvalidPromptError(
                f"The text has the lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start} of {len(text)}: it isn't valid Unicode. Decode it as UTF-16 pairs "
                f"or replace it with U+FFFD."
            ) from error


def _texts(value: Any) -> Any:
    """Of tokens that are written with how they are found, what they are."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {k: _texts(v) for k, v in value.items()}
    return [_texts(x) for x in value] if isinstance(value, list) else value


def _load_backend(folder: Path, settings: TokenizerSettings) -> Backend:
    """The first kind of tokenizer the folder has files for."""
    fast: FastBackend
    if (folder / "tokenizer.json").is_file():
        fast = FastBackend.from_json(folder / "tokenizer.json")
        if settings.tokenizer_class == "GPT2Tokenizer" and settings.add_prefix_space is not None:
            fast.add_prefix_space(settings.add_prefix_space)
    elif (folder / "tokenizer.model").is_file():
        if not looks_like_tiktoken(folder / "tokenizer.model"):
            return SentencePieceBackend(folder / "tokenizer.model", settings)
        fast = load_tiktoken(folder / "tokenizer.model")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        fast = load_vocab_and_merges(folder, settings)
    else:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        listing = f"it has {listed(found, 8)}" if found else "it is empty or doesn't exist"
        raise TokenizerError(
            f"{folder} has no tokenizer: no tokenizer.json, no tokenizer.model, no vocab.json with "
            f"merges.txt ({listing}). Download the model's tokenizer files too."
        )
    configure(fast, settings)
    return fast

"""The tokenizer and the chat templates of a GGUF file, from `tokenizer.*` in its metadata.

As a `Tokenizer`, or as the files of a model's folder.

Three kinds: "gpt2", byte-level BPE, whose way of splitting a text into words has a name
(`tokenizer.ggml.pre`); "llama", SentencePiece's BPE, whose merges follow from the scores; and
"gemma4", the same with merges of its own.
Sources: the specification ("Tokenizer"), and llama.cpp's llama-vocab.cpp for names and defaults.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from penstock.errors import TokenizerError, kind_of
from penstock.models.gguf.container import read_container
from penstock.models.gguf.words import word_rule
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.backend import FastBackend, configure
from penstock.tokenizer.pieces import SPACE_SYMBOL
from penstock.tokenizer.settings import TokenizerSettings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`."""

_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # so spelled in the specification
    "pad_token": "padding",
    "mask_token": "mask",
}
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Phi 3's special tokens take the white space after them; these don't."""


def gguf_tokenizer(path: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of the file `path`. With `vocab_size`, one that can produce more is refused."""
    tokenizer = Vocabulary(read_container(path).metadata, path).tokenizer()
    tokenizer.check_vocab_size(vocab_size)
    return tokenizer


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of the file `path` as a folder has it, here and for transformers.

    `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `additional_chat_templates/`.
    Raises TokenizerError for one that isn't built, before anything is written.
    """
    Vocabulary(read_container(path).metadata, path).write(folder)


class Vocabulary:
    """What a file says about its tokens."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._metadata = metadata
        self.kind = str(self._get("model", str))
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int, [NORMAL] * len(self.tokens))
        if len(set(self.tokens)) != len(self.tokens):
            counts = Counter(self.tokens)
            twice = next(token for token, count in counts.items() if count > 1)
            raise self._fail(f"the token {twice!r} is there twice")

    def tokenizer(self) -> Tokenizer:
        """Text to ids and back, as the files that the metadata was made of would give it."""
        built, settings = self._build()
        backend = FastBackend(built)
        configure(backend, settings)
        return Tokenizer(backend, settings, name=str(self.path))

    def write(self, folder: Path) -> None:
        """As `tokenizer`, in files."""
        built, settings = self._build()
        before, after = (
            settings.named_tokens[name] if asked else ""
            for name, asked in (
                ("bos_token", settings.add_bos_token),
                ("eos_token", settings.add_eos_token),
            )
        )
        built.post_processor = _affixes(built, before, after)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": settings.add_bos_token,
            "add_eos_token": settings.add_eos_token,
            "clean_up_tokenization_spaces": False,
            **settings.named_tokens,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        (folder / "tokenizer.json").write_text(built.to_str(pretty=True), encoding="utf-8")
        for name, template in settings.chat_templates.items():
            file = folder / "chat_template.jinja"
            if name != "default":
                file = folder / "additional_chat_templates" / f"{name}.jinja"
                file.parent.mkdir(exist_ok=True)
            file.write_text(template, encoding="utf-8")

    def _build(self) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
        if self.kind == "gpt2":
            built, add_bos = self._byte_level()
        elif self.kind in ("llama", "gemma4"):
            built, add_bos = self._sentencepiece(), True
        else:
            raise self._fail(
                f"tokenizer.ggml.model is {self.kind!r}, which isn't built; gpt2 (byte-level BPE), "
                "llama (SentencePiece) and gemma4 are"
            )
        self._add_special(built)
        return built, self._settings(add_bos)

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        """(tokenizer, whether BOS goes first where the file doesn't say)."""
        pre = self._get("pre", str, None)
        rule = None if pre is None else word_rule(pre)
        if rule is None:
            raise self._fail(
                "it doesn't say how words are split (tokenizer.ggml.pre)"
                if pre is None
                else f"the way of splitting words {pre!r} (tokenizer.ggml.pre) isn't known"
            )
        vocabulary, merges = self._spelled(), self._merges()
        try:
            model = models.BPE(vocabulary, merges, ignore_merges=rule.whole_words)
        except Exception as error:  # the library raises bare Exception and TypeError
            raise self._fail(
                f"{len(vocabulary):,} tokens and {len(merges):,} merges don't make a BPE: {error}"
            ) from error
        built = tokenizers.Tokenizer(model)
        if rule.composed:
            built.normalizer = normalizers.NFC()
        built.pre_tokenizer = rule.split(self._get("add_space_prefix", bool, False))
        built.decoder = decoders.ByteLevel()
        return built, rule.adds_bos

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        if self._get("remove_extra_whitespaces", bool, False):
            raise self._fail("it drops repeated white space, which isn't built")
        ranked = self.kind == "gemma4"
        vocabulary = self._spelled()
        merges = self._merges() if ranked else self._merges_by_score()
        unknown = self._token("unknown", None if ranked else 0)
        if unknown is not None and unknown not in vocabulary:
            raise self._fail(f"its unknown token, {unknown!r}, is marked as unused")
        try:
            model = models.BPE(
                vocabulary,
                merges,
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=BYTE in self.types,
            )
        except Exception as error:  # the library raises bare Exception and TypeError
            raise self._fail(f"{len(vocabulary):,} tokens don't make a BPE: {error}") from error
        built = tokenizers.Tokenizer(model)
        steps: list[Any] = [decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback()]
        steps.append(decoders.Fuse())
        spaced: list[Any] = [normalizers.Replace(" ", SPACE_SYMBOL)]
        if self._get("add_space_prefix", bool, not ranked):
            spaced.insert(0, normalizers.Prepend(SPACE_SYMBOL))
            steps.append(decoders.Strip(" ", 1, 0))
        built.normalizer = normalizers.Sequence(spaced)
        built.decoder = decoders.Sequence(steps)
        return built

    def _merges(self) -> list[tuple[str, str]]:
        return [self._merge(text) for text in self._list("merges", str)]

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Each way to join two pieces to a third, those to the best scores first.

        SentencePiece joins the neighbours whose piece has the highest score.
        """
        scores = self._list("scores", (int, float))
        normal = {
            token: score
            for token, score, kind in zip(self.tokens, scores, self.types, strict=True)
            if kind == NORMAL
        }
        place = {token: i for i, token in enumerate(self.tokens)}
        found = [
            (-score, place[token], place[token[:cut]], place[token[cut:]])
            for token, score in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        return [(self.tokens[left], self.tokens[right]) for _, _, left, right in sorted(found)]

    def _spelled(self) -> dict[str, int]:
        """Tokens by their text, without the rows that only fill the embedding up."""
        return {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != UNUSED
        }

    def _merge(self, text: str) -> tuple[str, str]:
        left, separator, right = text.partition(" ")
        if not separator or not left or not right or " " in right:
            raise self._fail(f"the merge {text[:60]!r} isn't two pieces with a space between")
        return left, right

    def _add_special(self, built: tokenizers.Tokenizer) -> None:
        """Tokens that are cut out of a text before its words are looked at."""
        cut = [
            tokenizers.AddedToken(
                token,
                special=kind != USER_DEFINED,
                rstrip=self._takes_space(token, kind),
                normalized=False,
            )
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]
        built.add_tokens(cut)

    def _takes_space(self, token: str, kind: int) -> bool:
        phi3 = self._metadata.get("general.architecture") == "phi3" and self.kind == "llama"
        return phi3 and token not in _PHI3_KEEPS_SPACE

    def _settings(self, add_bos: bool) -> TokenizerSettings:
        named = {name: self._token(key) for name, key in _NAMED.items()}
        add_bos = bool(self._get("add_bos_token", bool, add_bos))
        add_eos = bool(self._get("add_eos_token", bool, False))
        for name, asked in (("bos_token", add_bos), ("eos_token", add_eos)):
            if asked and named[name] is None:
                raise self._fail(f"a text should have its {name}, but there is no id for it")
        return TokenizerSettings(
            tokenizer_class=None,
            named_tokens={name: token for name, token in named.items() if token is not None},
            default_tokens={},
            extra_special_tokens=(),
            added_tokens={},
            add_bos_token=add_bos,
            add_eos_token=add_eos,
            add_prefix_space=False,
            legacy=None,
            chat_templates=self._templates(),
        )

    def _templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        found = {"default": self._metadata.get(prefix)} | {
            key.removeprefix(f"{prefix}."): text
            for key, text in self._metadata.items()
            if key.startswith(f"{prefix}.")
        }
        wrong = [name for name, text in found.items() if not isinstance(text, str | None)]
        if wrong:
            raise self._fail(f"the chat template {wrong[0]!r} isn't a text")
        strange = [name for name in found if not re.fullmatch(r"\w[\w.-]*", name)]
        if strange:  # a file's name, where it is written
            raise self._fail(f"a chat template is called {strange[0][:60]!r}")
        return {name: text for name, text in found.items() if text is not None}

    def _token(self, name: str, default: int | None = None) -> str | None:
        """The text of a token given by its id."""
        key = f"{name}_token_id"
        found: int | None = self._get(key, int, default)
        if found is None:
            return None
        if not 0 <= found < len(self.tokens):
            raise self._fail(f"{key} is {found}, but there are {len(self.tokens):,} tokens")
        return self.tokens[found]

    def _list(self, key: str, kind: Any, default: list[Any] | None = None) -> list[Any]:
        values = self._get(key, list) if default is None else self._get(key, list, default)
        if not all(isinstance(value, kind) for value in values):
            raise self._fail(f"tokenizer.ggml.{key} has values of another type")
        if key not in ("tokens", "merges") and len(values) != len(self.tokens):
            raise self._fail(
                f"tokenizer.ggml.{key} has {len(values):,} values for {len(self.tokens):,} tokens"
            )
        return list(values)

    def _get(self, key: str, kind: Any, *default: Any) -> Any:
        """`tokenizer.ggml.<key>`; an error where it is missing and there is no default."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", *default)
        if value is None and not default:
            raise self._fail(f"it has no tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, kind):
            raise self._fail(f"tokenizer.ggml.{key} is {kind_of(value)}")
        return value

    def _fail(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"The tokenizer in {self.path}: {what}. Give the folder of the model's tokenizer "
            "files beside it (tokenizer=…), or convert the file again with a newer converter."
        )


def _affixes(built: tokenizers.Tokenizer, before: str, after: str) -> Any:
    """What puts the tokens called `before` and `after` around a text, where they aren't empty."""
    parts = [part for part in (before, "$A", after) if part]
    special = [(token, built.token_to_id(token)) for token in (before, after) if token]
    if not special:
        return None
    second = [part.replace("$A", "$B") for part in parts]
    return processors.TemplateProcessing(
        single=parts,
        pair=[*parts, *(f"{part}:1" for part in second)],
        special_tokens=list(dict(special).items()),
    )

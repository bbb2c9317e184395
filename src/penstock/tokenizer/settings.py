"""What a folder's JSON files say about its tokenizer, apart from the vocabulary itself.

Read from `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
`chat_template.jinja`, `additional_chat_templates/*.jinja`, `chat_template.json`, and, only to learn
which family of tokenizer an unnamed one is, `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import TokenizerError, kind_of

# Used when no file names a token, and only if the vocabulary has it.
_CLASS_TOKENS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>"),
    "Qwen3_5Tokenizer": dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}

_MODEL_TYPE_CLASSES = (
    ("gpt2", "GPT2Tokenizer"),
    ("gpt_neo", "GPT2Tokenizer"),
    ("qwen3_5", "Qwen3_5Tokenizer"),
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen3", "Qwen2Tokenizer"),
)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before the vocabulary sees it."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The folder's settings; `None` where no file says anything."""

    tokenizer_class: str | None
    named_tokens: Mapping[str, str]
    default_tokens: Mapping[str, str]
    extra_special_tokens: tuple[str, ...]
    added_tokens: Mapping[int, AddedToken]
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_prefix_space: bool | None
    legacy: bool | None
    chat_templates: Mapping[str, str]
    added_tokens_file: str = "tokenizer_config.json"  # where `added_tokens` were read
    written: Mapping[str, Any] = field(default_factory=dict)  # in tokenizer_config.json


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of the tokenizer in `folder`; absent files leave their defaults."""
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    tokenizer_class = _tokenizer_class(folder, config)
    merged = {**special_map, **{key: value for key, value in config.items() if value is not None}}
    named, extra = _named_tokens(merged), _extra_special_tokens(merged)
    decoder = config.get("added_tokens_decoder") or {}
    older = not decoder and not (folder / "tokenizer.json").is_file()
    if older:
        added = _older_added_tokens(folder / "added_tokens.json", {*named.values(), *extra})
    else:
        added = _added_tokens(folder, decoder)
    return TokenizerSettings(
        tokenizer_class=tokenizer_class,
        named_tokens=named,
        default_tokens=_CLASS_TOKENS.get(tokenizer_class or "", {}),
        extra_special_tokens=extra,
        added_tokens=added,
        add_bos_token=_flag(config, "add_bos_token"),
        add_eos_token=_flag(config, "add_eos_token"),
        add_prefix_space=_flag(config, "add_prefix_space"),
        legacy=_flag(config, "legacy"),
        chat_templates=_chat_templates(folder, config),
        added_tokens_file="added_tokens.json" if older else "tokenizer_config.json",
        written=config,
    )


def read_text(path: Path) -> str:
    """A UTF-8 text file's content, or a `TokenizerError` that names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path} can't be read as UTF-8 text: {error}. Download the file again."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an absent file is an empty object."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits, nested too deep
        raise TokenizerError(
            f"{path} isn't valid JSON ({error}; the file has {len(text):,} characters). "
            f"It may be truncated: download it again."
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(
            f"{path} holds a JSON {type(value).__name__}, not an object. Download it again."
        )
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    return None if value is None else bool(value)


def _tokenizer_class(folder: Path, config: Mapping[str, Any]) -> str | None:
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast")
    model_type = str(read_json(folder / "config.json").get("model_type", ""))
    for prefix, tokenizer_class in _MODEL_TYPE_CLASSES:
        if model_type.startswith(prefix):
            return tokenizer_class
    return None


def _content(value: Any) -> str | None:
    """A token written as a string or as an `AddedToken` object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The usual ones, and a model's own: `image_token`, or the names of extra_special_tokens."""
    extra = config.get("extra_special_tokens")
    own = {name: config[name] for name in config if name.endswith("_token")}
    entries = {**(extra if isinstance(extra, Mapping) else {}), **own}
    found = {str(name): _content(value) for name, value in entries.items()}
    return {name: content for name, content in found.items() if content is not None}


def _extra_special_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    contents: list[str] = []
    # transformers 4 and 5 name the same list differently; 5 also allows {name: token}.
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(key) or []
        if isinstance(values, Mapping):
            values = values.values()
        elif not isinstance(values, list):
            raise TokenizerError(
                f"tokenizer_config.json or special_tokens_map.json: {key} must be a list of "
                f"tokens: {values!r}. Download the file again."
            )
        contents.extend(content for value in values if (content := _content(value)) is not None)
    return tuple(dict.fromkeys(contents))


def _added_tokens(folder: Path, decoder: Any) -> dict[int, AddedToken]:
    try:
        return {
            int(token_id): AddedToken(
                content=str(entry["content"]),
                special=bool(entry.get("special", False)),
                lstrip=bool(entry.get("lstrip", False)),
                rstrip=bool(entry.get("rstrip", False)),
                single_word=bool(entry.get("single_word", False)),
                normalized=bool(entry.get("normalized", True)),
            )
            for token_id, entry in sorted(decoder.items(), key=lambda item: int(item[0]))
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map token ids to "
            f"objects with a 'content', but reading it failed with {error!r}."
        ) from error


def _older_added_tokens(path: Path, special: Collection[str]) -> dict[int, AddedToken]:
    """Of `added_tokens.json`, which has only ids: `special` are those that other files name."""
    found: dict[int, AddedToken] = {}
    for content, token_id in read_json(path).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise TokenizerError(
                f"{path} must map tokens to their ids, but {content!r} has {token_id!r}. "
                f"Download the file again."
            )
        named = content in special
        found[token_id] = AddedToken(content, special=named, normalized=not named)
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """All named templates; a template file wins over the same name in the configuration."""
    templates: dict[str, str] = {}
    for source in (config, read_json(folder / "chat_template.json")):
        value = source.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, Mapping):
            templates.update({str(name): str(text) for name, text in value.items()})
        elif isinstance(value, list):
            templates.update(_template_list(folder, value))
        elif value is not None:
            raise TokenizerError(
                f"{folder}: chat_template is {kind_of(value)}, not a string or a list "
                f"of named templates."
            )
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    return templates


def _template_list(folder: Path, entries: list[Any]) -> dict[str, str]:
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            f"{folder}: every entry of a chat_template list needs a 'name' and a 'template', "
            f"but reading it failed with {error!r}."
        ) from error

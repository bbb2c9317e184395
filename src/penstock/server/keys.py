"""API keys: kept as hashes, compared in constant time, each with limits of its own."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, nearest

_DIGEST_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one key, or everybody where there are none, may ask for; None: as much as wanted."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    max_concurrency: int | None = None  # requests at once
    priority: int = 0  # of its requests that say nothing
    ttft_slo_ms: float | None = None  # likewise
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrency"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}.")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"priority must be an integer, not {self.priority!r}.")
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and (not number or not value > 0):
                raise ConfigError(f"{name} must be a time above 0, not {value!r}.")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `digest` is the SHA-256 of its text: the text itself isn't kept."""

    name: str
    digest: bytes
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, text: str, name: str, limits: Limits | None = None) -> Key:
        """A key from its text. Raises ConfigError for one that no header can carry."""
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(
                f"The API key {name!r} is empty."
                if not text
                else f"The API key {name!r} must be printable ASCII without spaces."
            )
        return cls(name, _digest(text), limits or Limits())


def find_key(keys: Iterable[Key], text: str) -> Key | None:
    """The key whose text this is. Every key is compared, so that the time tells nothing."""
    digest = _digest(text)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_keys(path: Path, defaults: Limits) -> list[Key]:
    """The keys of a TOML file, with `defaults` for limits that one of them doesn't set.

    A table `[[key]]` each: `name`, and `sha256` (64 hexadecimal digits) or `key`; then any of
    `Limits`. Raises ConfigError naming the entry.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The file of API keys {path} can't be read: {error}.") from error
    entries = document.pop("key", [])
    if document or not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{path} must hold one table [[key]] for each API key and nothing else; it has "
            f"{', '.join(map(repr, document)) or 'none'}."
        )
    return [_entry(path, i, entry, defaults) for i, entry in enumerate(entries)]


def _entry(path: Path, index: int, entry: Any, defaults: Limits) -> Key:
    where = f"{path}, key {index + 1}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a table [[key]].")
    limits = [one.name for one in fields(Limits)]
    known = ["name", "key", "sha256", *limits]
    for name in entry:
        if name not in known:
            raise ConfigError(f"{where}: {name!r} isn't known.{nearest(name, known)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: needs a name.")
    try:
        chosen = replace(defaults, **{k: v for k, v in entry.items() if k in limits})
        return _with_secret(entry, name, chosen)
    except ConfigError as error:
        raise ConfigError(f"{where} ({name}): {error}") from error


def _with_secret(entry: dict[str, Any], name: str, limits: Limits) -> Key:
    text, digest = entry.get("key"), entry.get("sha256")
    if (text is None) == (digest is None):
        raise ConfigError("give either key or sha256.")
    if isinstance(text, str):
        return Key.of(text, name, limits)
    if not isinstance(digest, str) or not _is_digest(digest):
        raise ConfigError(f"sha256 must be {_DIGEST_CHARACTERS} hexadecimal digits.")
    if bytes.fromhex(digest) == _digest(""):  # of a variable that wasn't set: it would let all in
        raise ConfigError("sha256 is the digest of an empty text. Hash the key itself.")
    return Key(name, bytes.fromhex(digest), limits)


def _is_digest(text: str) -> bool:
    return len(text) == _DIGEST_CHARACTERS and all(c in "0123456789abcdefABCDEF" for c in text)


def keys_of(texts: Sequence[str], limits: Limits) -> list[Key]:
    """Keys that were given as text, named by their order: key-1, key-2, …"""
    found: list[Key] = []
    for i, text in enumerate(texts):
        try:
            found.append(Key.of(text, f"key-{i + 1}", limits))
        except ConfigError as error:
            raise ConfigError(f"--api-key, number {i + 1} of {len(texts)}: {error}") from error
    return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()

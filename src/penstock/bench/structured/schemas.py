"""JSON schemas: of a file, a folder or an archive, or a few of our own."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError

_WRAPPERS: Final = ("schema", "json_schema")
"""Keys under which collections keep a schema beside its tests and its description."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One schema, and where it is from."""

    name: str
    document: dict[str, Any] | bool

    @property
    def text(self) -> str:
        """As JSON, keys in their order."""
        return json.dumps(self.document, ensure_ascii=False)


def read_schemas(path: Path) -> list[Schema]:
    """All schemas of a .json or .jsonl file, a folder of these, or a .tar archive of these.

    A schema may stand alone, in a list, or in an object under "schema" or "json_schema". Raises
    ConfigError.
    """
    if not path.exists():
        raise ConfigError(f"--schemas {path}: there is no such file or folder.")
    try:
        found = [one for name, text in _files(path) for one in _schemas(name, text)]
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"--schemas {path} can't be read: {error}.") from error
    if not found:
        raise ConfigError(
            f"--schemas {path} holds no schema. Give a .json or .jsonl file, a folder of them, or "
            "a .tar, .tar.gz or .tar.xz archive."
        )
    return found


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of what holds JSON."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in (".json", ".jsonl") and file.is_file():
                yield file.name, file.read_bytes()
    elif ".tar" in path.suffixes or path.suffix == ".tgz":
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and Path(member.name).suffix in (".json", ".jsonl"):
                    content = archive.extractfile(member)
                    assert content is not None  # of a regular file
                    yield Path(member.name).name, content.read()
    elif path.suffix in (".json", ".jsonl"):
        yield path.name, path.read_bytes()


def _schemas(name: str, data: bytes) -> Iterator[Schema]:
    """Those of one file."""
    stem = Path(name).stem
    try:
        text = data.decode("utf-8-sig")
        if name.endswith(".jsonl"):
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            whole = json.loads(text)
            documents = whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} isn't JSON: {error}.") from error
    for i, document in enumerate(documents):
        place = stem if len(documents) == 1 else f"{stem} {i + 1}"
        yield Schema(place, _unwrapped(place, document))


def _unwrapped(name: str, document: Any) -> dict[str, Any] | bool:
    if isinstance(document, dict):
        for key in _WRAPPERS:
            inner = document.get(key)
            if isinstance(inner, str):
                try:
                    inner = json.loads(inner)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f'{name}: "{key}" isn\'t JSON: {error}.') from error
            if isinstance(inner, dict | bool):
                return inner
    if isinstance(document, dict | bool):
        return document
    raise ConfigError(f"{name} is {json.dumps(document):.60}, which is no schema.")


def built_in() -> list[Schema]:
    """Eight of the forms that programs ask of models."""
    return [Schema(name, document) for name, document in _BUILT_IN.items()]


def _object(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT: Final = {"type": "string", "maxLength": 60}
_BUILT_IN: Final[dict[str, dict[str, Any]]] = {
    "answer": _object(
        answer=_TEXT,
        confidence={"type": "number", "minimum": 0, "maximum": 1},
        sources={"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4},
    ),
    "sentiment": _object(sentiment={"enum": ["positive", "neutral", "negative"]}, reason=_TEXT),
    "person": _object(
        name={"type": "string", "minLength": 1, "maxLength": 40},
        born={"type": "string", "format": "date"},
        email={"type": ["string", "null"], "maxLength": 40},
        is_member={"type": "boolean"},
    ),
    "tool call": {
        "anyOf": [
            _object(
                name={"const": "get_weather"},
                arguments=_object(city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
            ),
            _object(
                name={"const": "send_message"},
                arguments=_object(recipient=_TEXT, subject=_TEXT, body=_TEXT),
            ),
        ]
    },
    "order": _object(
        order_number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": _object(
                article=_TEXT,
                quantity={"type": "integer", "minimum": 1, "maximum": 999},
                unit_price={"type": "number", "minimum": 0},
            ),
        },
        shipping_address=_object(
            street=_TEXT, postal_code={"type": "string", "pattern": "^[0-9]{5}$"}, city=_TEXT
        ),
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                label={"type": "string", "maxLength": 20},
                children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            )
        },
    },
    "table": _object(
        columns={"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        rows={
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "maxItems": 5},
            "maxItems": 5,
        },
    ),
    "review": _object(
        summary=_TEXT,
        findings={
            "type": "array",
            "maxItems": 3,
            "items": _object(
                severity={"enum": ["low", "medium", "high"]},
                line_number={"type": "integer", "minimum": 1, "maximum": 99999},
                suggested_replacement={"type": ["string", "null"], "maxLength": 60},
            ),
        },
        approved={"type": "boolean"},
    ),
}

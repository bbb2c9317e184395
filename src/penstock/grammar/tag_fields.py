"""Reading the fields of a structural tag's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.grammar.refusal import Refusal, pointer

TEXT: Final = r"(?s:.*)"


def quoted(text: str) -> str:
    """A text as a regex between slashes."""
    return "".join(
        one if one.isascii() and one.isalnum() else f"\\u{{{ord(one):X}}}" for one in text
    )


def texts(form: Mapping[str, Any], name: str, path: tuple[str | int, ...]) -> list[str]:
    """A list of texts, none of them empty; without the field there are none."""
    found: list[Any] = field(form, name, list, path, default=[])
    if not all(isinstance(one, str) and one for one in found):
        raise Refusal(f"{name} must be a list of texts", pointer((*path, name)))
    return found


def without(form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    """What a text isn't that has none of the excluded words, in Lark."""
    words = "|".join(map(quoted, texts(form, "excludes", path)))
    return f" & ~/{TEXT}(?:{words}){TEXT}/" if words else ""


def never_first(form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    """What a text isn't that begins, behind white space, with none of these words, in Lark."""
    words = "|".join(map(quoted, texts(form, "never_first", path)))
    return rf" & ~/\s*(?:{words}){TEXT}/" if words else ""


def known(form: Mapping[str, Any], names: tuple[str, ...], path: tuple[str | int, ...]) -> None:
    """Raises Refusal for a field that a part of this kind hasn't."""
    for name in form:
        if name not in names:
            raise Refusal(
                f"{name!r} can't be followed; known are {', '.join(names)}", pointer(path)
            )


def field(
    form: Mapping[str, Any],
    name: str,
    kind: Any,
    path: tuple[str | int, ...],
    default: Any = None,
) -> Any:
    """A field's value. Raises Refusal for one of another kind."""
    value = form.get(name, default)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is Sequence and isinstance(value, str)):
        wanted = {str: "a text", int: "a whole number", bool: "true or false", Mapping: "an object"}
        raise Refusal(f"{name} must be {wanted.get(kind, 'a list')}", pointer((*path, name)))
    return value

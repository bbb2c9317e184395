"""Parts of structural tags, of which the forms of calls are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Part: TypeAlias = dict[str, Any]


def text(value: str) -> Part:
    """A text as it is."""
    return {"type": "const_string", "value": value}


def sequence(*parts: Part) -> Part:
    """One after the other."""
    return {"type": "sequence", "elements": list(parts)}


def as_tag(begin: str, content: Part, end: str) -> Part:
    """What stands between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def as_json(schema: Any) -> Part:
    """A value of a schema, laid out as templates and training texts have it."""
    return {"type": "json_schema", "json_schema": schema, "any_whitespace": False}


def held_json(one: Any, root: Mapping[str, Any]) -> Part:
    """A value as JSON; references lead to definitions, which come along."""
    return as_json({**one, **definitions(root)} if isinstance(one, Mapping) else one)


def definitions(schema: Mapping[str, Any]) -> Part:
    """What references mostly lead to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}

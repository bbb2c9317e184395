"""Parts of structural tags, of which the forms of calls are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

Part: TypeAlias = dict[str, Any]


def text(value: str) -> Part:
    """A text as it is."""
    return {"type": "const_string", "value": value}


def sequence(*parts: Part) -> Part:
    """One after the other."""
    return {"type": "sequence", "elements": list(parts)}


def one_of(parts: Sequence[Part]) -> Part:
    """Any of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


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


def members(
    values: Mapping[str, Part], required: Collection[str], *, comma: str, sign: str
) -> Part:
    """`a=1, b="x"`: the required ones first, then any of the others in their order."""
    optional = [name for name in values if name not in required]

    def one(name: str, behind: bool) -> Part:
        return sequence(text(f"{comma if behind else ''}{name}{sign}"), values[name])

    def rest(names: Sequence[str]) -> list[Part]:
        return [{"type": "optional", "content": one(name, True)} for name in names]

    if required:
        first = [one(name, i > 0) for i, name in enumerate(required)]
        return sequence(*first, *rest(optional))
    if not optional:
        return text("")
    starts = [
        sequence(one(name, False), *rest(optional[i + 1 :])) for i, name in enumerate(optional)
    ]
    return {"type": "optional", "content": {"type": "or", "elements": starts}}

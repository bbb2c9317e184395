"""Parameters in Qwen3-Coder's XML: a string as it is, anything else as JSON.

What is written must be read as the same: where a parameter may be a string or something else, the
reader takes its text for a string (but for null, where that may be): nothing else is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from penstock.server.tools.parts import Part, as_json, as_tag, held_json, text
from penstock.server.tools.qwen3_coder import PARAMETER, PARAMETER_END, kinds_of, read_value
from penstock.server.tools.raw_text import Unsaid, part_of, texts_of
from penstock.server.tools.verdict import follows

_ANY_TEXT: Final[Part] = {"type": "any_text", "excludes": [PARAMETER_END]}
_PLAIN: Final = frozenset(("type", "description", "title", "default", "examples"))
_NULL: Final = "null"


def parameter(name: str, value: Part) -> Part:
    """A parameter with its value."""
    return as_tag(f"{PARAMETER}{name}>\n", value, f"\n{PARAMETER_END}\n")


def loose(kinds: Collection[str]) -> Part:
    """Any value of a parameter that may have these types."""
    return dict(_ANY_TEXT) if not kinds or "string" in kinds else as_json(True)


def held(schema: Any, root: Mapping[str, Any]) -> Part:
    """A value that follows a schema. Raises Unsaid."""
    known = kinds_of(schema, root)
    kinds = known or frozenset()
    if known is not None and "string" not in known:
        return held_json(schema, root)
    if isinstance(schema, Mapping) and schema.keys() <= _PLAIN:
        return dict(_ANY_TEXT)
    texts = texts_of(schema, root)
    null = follows(schema, None, root) if _NULL in kinds else False
    options = [] if texts.listed is not None else part_of(texts.ways, PARAMETER_END)
    for one in texts.listed or ():
        if PARAMETER_END not in one and read_value(one, kinds) == json.dumps(
            one, ensure_ascii=False
        ):
            options.append(text(one))
    if texts.listed is None and _NULL in kinds and null is not True:
        raise Unsaid("whether null may be written can't be told")
    if null is True:
        options.append(text(_NULL))
    if not options:
        raise Unsaid("no text can be written that follows it")
    if texts.listed is None and texts.ways == [()]:
        return dict(_ANY_TEXT)
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}

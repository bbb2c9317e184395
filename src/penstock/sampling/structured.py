"""What a request asks of its output's structure: vLLM's names, checked at once.

Whether a schema or a grammar can be followed is known once it is compiled, by `penstock.grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from penstock.errors import InvalidSamplingError, kind_of, nearest
from penstock.sampling.closed import closed

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""What an output may be held to; one of them at a time."""

MOST_LITERAL: Final = 40_000
"""Characters of one choice: each takes a state of the lexer, which has 50,000."""

MOST_CHARACTERS: Final = {
    "json": 4 << 20,
    "choice": 4 << 20,
    "structural_tag": 1 << 20,
    "grammar": 200_000,
    "regex": 200_000,
    "whitespace_pattern": 200_000,
}
"""More is refused before it is read: each keeps a refusal within a second. A schema may have most,
for much of it is often descriptions."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output is held to; one of the first six.

    json: a JSON schema, as an object or as text; json_object: any JSON object; regex: the whole
    output matches it (Rust's syntax); choice: the output is one of these texts; grammar: Lark, as
    llguidance reads it, or GBNF, as llama.cpp does; structural_tag: free text in which certain
    words begin a part that follows a schema, in vLLM's form.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False  # of json and json_object: compact, as json.dumps writes
    whitespace_pattern: str | None = None  # of json and json_object: a regex for all whitespace
    # of json, as vLLM has it: objects have the properties that the schema names, and no others
    # where it doesn't say (`penstock.sampling.closed`)
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:  # a schema that nothing satisfies
            given = ["json", *given]
        if len(given) != 1:
            said = " and ".join(given) if given else "none of them"
            raise InvalidSamplingError(
                f"structured_outputs takes one of {', '.join(KINDS)}, but {said} is given."
            )
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                object.__setattr__(self, name, _as_json(name, value))
        if isinstance(self.json, bool):
            object.__setattr__(self, "json", "true" if self.json else "false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InvalidSamplingError(
                    f"structured_outputs.{name} is {value!r:.60}; it must be true or false."
                )
        if self.disable_additional_properties and self.kind != "json":
            raise InvalidSamplingError(
                "structured_outputs sets disable_additional_properties, which only json has, "
                f"beside {self.kind}. Leave it out."
            )
        if self.disable_additional_properties and self.json != "true":
            schema = closed(json.loads(self.text))
            object.__setattr__(self, "json", json.dumps(schema, ensure_ascii=False))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidSamplingError(
                "structured_outputs sets both disable_any_whitespace and whitespace_pattern. Leave "
                "out one of them."
            )
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and self.kind not in ("json", "json_object"):
            raise InvalidSamplingError(
                f"structured_outputs says how whitespace goes, which only json and json_object "
                f"have, beside {self.kind}. Leave it out."
            )

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """One of these, or a mapping with its fields. Raises InvalidSamplingError."""
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise InvalidSamplingError(
                f"structured_outputs is {value!r:.60}, {kind_of(value)}. Pass an object "
                f"with one of {', '.join(KINDS)}."
            )
        known = [one.name for one in fields(cls)]
        for name in value:
            if name not in known:
                raise InvalidSamplingError(
                    f"structured_outputs has no {name!r}.{nearest(str(name), known)} It takes one "
                    f"of {', '.join(KINDS)}."
                )
        return cls(**value)

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What it holds the output to, as text: a schema as JSON, choices as a JSON list."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


def _check_text(name: str, value: object) -> None:
    """Raises InvalidSamplingError for what isn't a text that can be read."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidSamplingError(
            f"structured_outputs.{name} is {value!r:.60}, {kind_of(value)}. Pass a text."
        )
    if not value and name != "whitespace_pattern":
        raise InvalidSamplingError(f"structured_outputs.{name} is empty. Leave it out.")
    if len(value) > MOST_CHARACTERS[name]:
        raise InvalidSamplingError(
            f"structured_outputs.{name} has {len(value):,} characters; at most "
            f"{MOST_CHARACTERS[name]:,} are read. Make it shorter."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidSamplingError(
            f"structured_outputs.{name} holds half of a surrogate pair at {error.start}, which is "
            "no character."
        ) from error


def _as_json(name: str, value: object) -> str:
    """A schema as JSON text, in the order in which it was given. Raises InvalidSamplingError."""
    if isinstance(value, str):
        _check_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidSamplingError(f"structured_outputs.{name} isn't JSON: {error}.") from error
    if name == "json" and isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, Mapping):
        raise InvalidSamplingError(
            f"structured_outputs.{name} is {value!r:.60}, {kind_of(value)}. Pass an object."
        )
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSamplingError(
            f"structured_outputs.{name} can't be written as JSON: {error}."
        ) from error
    _check_text(name, text)
    return text


def _choices(value: object) -> tuple[str, ...]:
    """`choice` as a tuple of texts, each once."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidSamplingError(
            f"structured_outputs.choice is {value!r:.60}, {kind_of(value)}. Pass a list of texts."
        )
    if not value:
        raise InvalidSamplingError("structured_outputs.choice is empty, so nothing can be chosen.")
    for i, one in enumerate(value):
        if not isinstance(one, str) or not one:
            raise InvalidSamplingError(
                f"structured_outputs.choice[{i}] is {one!r:.60}; it must be a text of at least one "
                "character."
            )
    longest = max(range(len(value)), key=lambda i: len(value[i]))
    if len(value[longest]) > MOST_LITERAL:
        raise InvalidSamplingError(
            f"structured_outputs.choice[{longest}] has {len(value[longest]):,} characters; at most "
            f"{MOST_LITERAL:,} can be followed. Make it shorter."
        )
    if sum(map(len, value)) > MOST_CHARACTERS["choice"]:
        raise InvalidSamplingError(
            f"structured_outputs.choice has {sum(map(len, value)):,} characters; at most "
            f"{MOST_CHARACTERS['choice']:,} are read. Offer fewer choices, or shorter ones."
        )
    return tuple(dict.fromkeys(value))

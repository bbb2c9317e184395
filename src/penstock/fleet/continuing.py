"""An answer that broke off is gone on with by another instance, where it broke off.

An instance computes the same bits as another of the same model (docs/architecture.md, Exactness),
so the second one's answer begins with what the client has: that much of it is left out. It is held
against what was sent, by `==`: an instance that says something else (another model, version or
format) isn't gone on with.

Source of the form of events: OpenAI's API reference, chat completion chunks and completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.server.errors import ApiError
from penstock.server.sse import DONE, event

_END = b"\n\n"
_DATA = b"data: "
_HEAD = ("id", "created", "model", "object", "system_fingerprint")
_ONCE = frozenset(("role", "id", "type"))
"""What is said once of a message or of a call, and may differ (a call's id is random)."""
_ENDS = ("finish_reason", "stop_reason")
Path = tuple[str | int, ...]


@dataclass(slots=True)
class _Choice:
    """What of one choice has come: by field, all of a text or a list."""

    grown: dict[Path, str | list[Any]] = field(default_factory=dict)
    once: set[Path] = field(default_factory=set)
    ended: bool = False


class Events:
    """Splits a stream into whole events."""

    def __init__(self) -> None:
        self.rest = b""  # of one that isn't whole yet

    def feed(self, data: bytes) -> bytes:
        """The whole events that are there now, as they came."""
        whole, end, self.rest = (self.rest + data).rpartition(_END)
        return whole + end


class Sent:
    """What a client was sent of an answer. Nothing is read of it unless it breaks off."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, events: bytes) -> None:
        """Whole events were sent."""
        self._pieces.append(events)

    @property
    def ended(self) -> bool:
        """Whether that was all."""
        return bool(self._pieces) and self._pieces[-1].endswith(DONE)

    def continuation(self) -> Continuation:
        """For another instance's events."""
        found = Continuation()
        for data in _read(b"".join(self._pieces)):
            found.take(data)
        return found


class Continuation:
    """Lets through what of another instance's events wasn't sent before."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._said: dict[int, _Choice] = {}  # by the first instance
        self._now: dict[int, _Choice] = {}  # by the second
        self._counted = False  # the usage was sent

    def take(self, data: dict[str, Any]) -> None:
        """An event that was sent."""
        self._head = self._head or {k: data[k] for k in _HEAD if k in data}
        self._counted = self._counted or (not data.get("choices") and "usage" in data)
        for choice in data.get("choices", ()):
            said = self._said.setdefault(choice["index"], _Choice())
            said.ended = said.ended or choice.get("finish_reason") is not None
            for path, value in _walk(choice):
                if path[-1] in _ONCE:
                    said.once.add(path)
                elif value is not None:
                    said.grown[path] = said.grown[path] + value if path in said.grown else value

    def filter(self, events: bytes) -> bytes:
        """What of whole events is new. Raises ApiError 502 where they say something else."""
        found = [self._new(data) for data in _read(events)]
        end = DONE if events.endswith(DONE) else b""
        return b"".join(event(data) for data in found if data is not None) + end

    def _new(self, data: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in data:
            return data
        made = data | {k: v for k, v in self._head.items() if k in data}
        if not data.get("choices"):
            if self._counted and "usage" in data:
                return None
            return made
        choices = [x for x in map(self._new_choice, data["choices"]) if x is not None]
        return made | {"choices": choices} if choices else None

    def _new_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index = choice["index"]
        said = self._said.get(index, _Choice())
        now = self._now.setdefault(index, _Choice())
        if said.ended:
            return None
        left: dict[Path, Any] = {}
        for path, value in _walk(choice):
            if path[-1] in _ONCE:
                if path not in said.once:
                    left[path] = value
            elif value is not None:
                is_first = path not in said.grown and path not in now.grown  # an empty one as well
                kept = self._beyond(said.grown.get(path), now.grown.get(path), value)
                now.grown[path] = now.grown[path] + value if path in now.grown else value
                if kept or is_first:
                    left[path] = kept
        ends = choice.get("finish_reason") is not None
        if not left and not ends:
            return None
        made = {k: v if k in ("index", *_ENDS) else _emptied(k, v) for k, v in choice.items()}
        for path, value in left.items():
            _put(made, path, value)
        return made

    @staticmethod
    def _beyond(said: Any, before: Any, value: Any) -> Any:
        """What of `value`, which follows `before`, goes beyond what was said."""
        if said is None:
            return value
        at = 0 if before is None else len(before)
        overlap = said[at : at + len(value)]
        if value[: len(overlap)] != overlap:
            raise ApiError(
                502,
                "The instance that answered has ended, and another one's answer isn't the same: "
                f"{str(value)[:40]!r} where {str(overlap)[:40]!r} was sent.",
                code="answers_differ",
            )
        return value[len(overlap) :]


def _emptied(name: str, value: Any) -> Any:
    """A field of a choice before anything is put into it."""
    if isinstance(value, str | list) or (isinstance(value, dict) and name != "logprobs"):
        return type(value)()
    return None


def _read(events: bytes) -> Iterator[dict[str, Any]]:
    """The data of whole events, less [DONE] and comments."""
    for one in events.split(_END):
        if one.startswith(_DATA) and one != DONE[: -len(_END)]:
            found = json.loads(one[len(_DATA) :])
            if isinstance(found, dict):
                yield found


def _walk(choice: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """What grows of a choice, by where it stands: texts and lists; and what is said once."""
    for name, value in choice.items():
        if name not in ("index", *_ENDS):
            yield from _below((name,), value)


def _below(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _below((*path, name), one)
    elif isinstance(value, list) and path[-1] == "tool_calls":
        for one in value:
            for name, part in one.items():
                if name != "index":
                    yield from _below((*path, one["index"], name), part)
    elif value is None or isinstance(value, str | list):
        yield path, value


def _put(target: dict[str, Any], path: Path, value: Any) -> None:
    """Set what stands at `path`; calls, known by their index, are in a list."""
    for i, name in enumerate(path[:-1]):
        if isinstance(path[i + 1], int):
            calls: list[dict[str, Any]] = target.setdefault(str(name), [])
            number = path[i + 1]
            call = next((x for x in calls if x["index"] == number), None)
            if call is None:
                call = {"index": number}
                calls.append(call)
            target = call
        elif isinstance(name, str):
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
    target[str(path[-1])] = value


def engine_died(events: bytes) -> bool:
    """Whether they end with the word of an instance that its engine has stopped."""
    if b'"engine_dead"' not in events:
        return False
    return any(
        isinstance(x.get("error"), dict) and x["error"].get("code") == "engine_dead"
        for x in _read(events)
    )

"""What a request goes on from: responses that are kept, and items of theirs that it refers to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from penstock.server.errors import ApiError
from penstock.server.protocol.common import MOST_MESSAGES
from penstock.server.protocol.items import REFERENCE, InputItem
from penstock.server.stored import Stored, StoredResponses, UnknownResponse

NOT_KEPT = (
    "This server keeps no responses (--response-store-mib 0): send the items themselves, as "
    "clients do with store: false."
)
MOST_ID_CHARACTERS = 256
_ITEMS = TypeAdapter(list[InputItem])
_ITEM_ID = re.compile(r"[a-z]{2,3}_(.{1,200}?)(?:_i?[0-9]{1,5})?")
_SHORT = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
"""How the id of an item begins."""
_WHY = (
    "It was never kept (store: false), was deleted, has made way for others, is too old "
    "(--response-store-mib, --response-store-hours), or another instance of a fleet has it."
)


@dataclass(slots=True)
class Earlier:
    """What one request may go on from.

    stored: None where nothing is kept; owner: its key's name; most: bytes of earlier items that it
    may bring in; chain: the responses that it goes on from, the first one first.
    """

    stored: StoredResponses | None = None
    owner: str = ""
    most: int = 0
    chain: Sequence[Stored] = ()
    referred: dict[str, Stored] = field(default_factory=dict)  # by their ids
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)  # items of these, by theirs
    _taken: int = 0  # bytes

    @property
    def size(self) -> int:
        """Bytes that are to be read."""
        return sum(x.items_bytes for x in (*self.chain, *self.referred.values()))

    @property
    def count(self) -> int:
        """Items of the chain."""
        return sum(one.count for one in self.chain)

    def find(self, previous: str | None, items: Sequence[InputItem]) -> None:
        """Look up what a request names. Raises ApiError 400 for what isn't there or is too much."""
        if previous:
            self._go_on_from(previous)
        references = [(i, x.id or "") for i, x in enumerate(items) if x.type == REFERENCE]
        for i, name in references:
            if self.stored is None:
                raise not_kept("input", f"input[{i}] refers to an item.")
            response = response_of(name)
            try:
                self.referred[response] = self.stored.get(self.owner, response)
            except UnknownResponse as error:
                raise no_item(i, name) from error
        self._check_size(len(items))

    def _go_on_from(self, previous: str) -> None:
        if self.stored is None:
            raise not_kept("previous_response_id")
        try:
            self.chain = self.stored.chain(self.owner, previous)
        except UnknownResponse as error:
            raise no_previous(error.name, previous) from error

    def _check_size(self, own: int) -> None:
        if self.count + own > MOST_MESSAGES or self.size > self.most:
            raise ApiError(
                400,
                f"The conversation up to this request has {self.count + own:,} items, and the "
                f"responses that it names {self.size:,} bytes; at most {MOST_MESSAGES:,} and "
                f"{self.most:,} are read. Begin anew, or with a summary from "
                "/v1/responses/compact.",
                param="previous_response_id" if self.chain else "input",
                code="context_length_exceeded",
            )

    def items(self) -> list[InputItem]:
        """Of the chain: what was sent and what was answered, in turn."""
        found: list[InputItem] = []
        for one in self.chain:
            found += _ITEMS.validate_json(one.input)
            found += _ITEMS.validate_python(_whole(json.loads(one.output)))
        return found

    def resolved(self, items: Sequence[InputItem]) -> list[InputItem]:
        """The items, with those that are referred to in place of references. Raises ApiError."""
        self._taken = 0
        return [
            x if x.type != REFERENCE else self._item(i, x.id or "") for i, x in enumerate(items)
        ]

    def _item(self, place: int, name: str) -> InputItem:
        response = response_of(name)
        one = self.referred.get(response)
        if one is None:
            raise no_item(place, name)
        if response not in self._known:
            self._known[response] = {x["id"]: x for x in _all(one)}
        found = self._known[response].get(name)
        if found is None or not _whole([found]):
            raise no_item(place, name)
        self._taken += len(json.dumps(found))
        if self._taken > self.most:
            raise ApiError(
                400,
                f"The items up to input[{place}] that are referred to have {self._taken:,} bytes; "
                f"at most {self.most:,} are read.",
                param="input",
                code="context_length_exceeded",
            )
        return _ITEMS.validate_python([found])[0]


NOTHING = Earlier()
"""Of a server that keeps nothing."""


def response_of(name: str) -> str:
    """The id of the response that an item belongs to, by its own; whatever it is, for another's."""
    found = _ITEM_ID.fullmatch(name)
    return "" if found is None else f"resp_{found[1]}"


def as_json(items: Sequence[InputItem]) -> bytes:
    """To be kept."""
    return _ITEMS.dump_json(list(items), exclude_none=True)


def listed(chain: Sequence[Stored]) -> list[dict[str, Any]]:
    """The input of a chain's last response: all that it was made from, oldest first, with ids."""
    *before, last = chain
    return [*(item for one in before for item in _all(one)), *_inputs(last)]


def _all(one: Stored) -> Iterator[dict[str, Any]]:
    yield from _inputs(one)
    yield from json.loads(one.output)


def _inputs(one: Stored) -> Iterator[dict[str, Any]]:
    """As the API has them: each with an id, and a message's text as a part."""
    for i, item in enumerate(json.loads(one.input)):
        kind = item["type"]
        own = f"{_SHORT[kind]}_{one.id.removeprefix('resp_')}_i{i}"
        made = {"id": own, **item}
        if kind == "message":
            said = made.get("content") or ""
            if isinstance(said, str):
                part: dict[str, Any] = {"type": "input_text", "text": said}
                if made.get("role") == "assistant":
                    part = {"type": "output_text", "text": said, "annotations": []}
                made["content"] = [part]
        if kind != "compaction":
            made.setdefault("status", "completed")
        yield made


def _whole(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without calls that broke off, which nobody could have made: their text is in a message."""
    return [x for x in items if x["type"] != "function_call" or x["status"] == "completed"]


def not_kept(field: str, what: str = "") -> ApiError:
    """400 for a field that a server which keeps nothing can't heed."""
    told = what or f"{field!r} is sent."
    return ApiError(400, f"{told} {NOT_KEPT}", param=field, code="unsupported_parameter")


def no_previous(name: str, after: str | None = None) -> ApiError:
    """400. after: the one that was asked for, which goes on from what isn't there."""
    before = "" if after in (None, name) else f", which {(after or '')[:80]!r} goes on from,"
    return ApiError(
        400,
        f"Previous response with id {name[:80]!r}{before} not found. {_WHY} Send the items of the "
        "conversation instead.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def no_response(name: str, after: str | None = None) -> ApiError:
    """404 for one that is asked for by itself. after: as in `no_previous`."""
    before = "" if after in (None, name) else f", which {(after or '')[:80]!r} goes on from,"
    return ApiError(
        404, f"Response with id {name[:80]!r}{before} not found. {_WHY}", code="response_not_found"
    )


def no_item(place: int, name: str) -> ApiError:
    """400 for a reference. place: of the input."""
    return ApiError(
        400,
        f"Item with id {name[:80]!r} (in 'input[{place}]') not found. {_WHY} Send the item itself, "
        "as clients do with store: false.",
        param="input",
        code="item_not_found",
    )

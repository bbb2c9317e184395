"""Which instance keeps a response: who goes on from one is sent there.

An instance knows the fleet's callers by nothing, so here is also whose each is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.fleet.ask import Ask
from penstock.server.errors import ApiError
from penstock.server.protocol.earlier import no_item, no_previous, response_of

HEADER = "x-penstock-stored"
"""By which an instance tells the id of a response that it keeps."""
_MOST = 1 << 16  # that are known: beyond, those that were asked for longest ago aren't


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is kept: by an instance of a model, for a key. All by name."""

    key: str
    model: str
    worker: str


class Kept:
    """The places of the latest responses, by their ids."""

    def __init__(self, most: int = _MOST) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._most = most

    def put(self, name: str, place: Place) -> None:
        """An instance keeps it from now on, or will once it is whole."""
        self._places[name] = place
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def get(self, name: str, key: str) -> Place | None:
        """None: none is known to keep one of this id for this key."""
        found = self._places.get(name)
        if found is None or found.key != key:
            return None
        self._places.move_to_end(name)
        return found

    def forget(self, name: str) -> None:
        """It was deleted."""
        self._places.pop(name, None)

    def worker_for(self, ask: Ask, model: str, key: str) -> str | None:
        """The instance that a request has to be sent to; None: it may be any.

        Raises ApiError 400 for what none keeps, or one of another model.
        """
        previous = ask.previous
        found = None if previous is None else self.get(previous, key)
        if previous is not None and found is None:
            raise no_previous(previous)
        for i, name in ask.references:
            at = self.get(response_of(name), key)
            if at is None:
                raise no_item(i, name)
            found = at if previous is None else found  # the latest one's
        if found is not None and found.model != model:
            raise ApiError(
                400,
                f"What the request goes on from is kept by an instance of {found.model!r}, and it "
                f"is for {model!r}. Send the items of the conversation instead.",
                param="input" if previous is None else "previous_response_id",
                code="previous_response_not_found",
            )
        return None if found is None else found.worker

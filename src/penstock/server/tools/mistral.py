"""Mistral's forms, behind the control token `[TOOL_CALLS]`.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]       tokenizers to v7
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}            v11
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                              v13 on

The older form lists all calls, the newer ones have a token each. Ids are nine letters or digits.
Source: mistral-common's documentation of its tokenizers, and the models' chat templates.
"""

from __future__ import annotations

import re

from penstock.server.tools.reader import CallReader, Marks, Reading

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPEN = Marks(OPEN)
_NAME = re.compile(r"[^\s\[\]{}]")
_ID = re.compile(r"[a-zA-Z0-9]")
_ID_CHARACTERS = 9
_MOST_NAME = 256


class MistralReader(CallReader):
    """Reads both forms, and an object alone, as smaller models write it."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (yield from self.text_until(_OPEN)) is not None:
            yield from self.space()
            first = yield from self.peek()
            if first == "[":
                whole = yield from self._list()
            elif first == "{":
                whole = yield from self.call_of_object()
            else:
                whole = yield from self._named()
            if not whole:
                self.refuse()

    def _list(self) -> Reading[bool]:
        yield from self.literal("[")
        while True:
            yield from self.space()
            if not (yield from self.call_of_object()):
                return False
            if (yield from self.closing("]")):
                return True
            if not (yield from self.closing(",")):
                return True  # cut off behind a call

    def _named(self) -> Reading[bool]:
        name = yield from self.take_matching(_NAME, _MOST_NAME)
        if not self.is_name(name):
            return False
        yield from self.space()
        if (yield from self.literal(CALL_ID)):
            yield from self.take_matching(_ID, _ID_CHARACTERS)
        yield from self.literal(ARGS)
        yield from self.space()
        if (yield from self.peek()) != "{":
            return False
        self.begin(name)
        if not (yield from self.object_of_arguments()):
            return False
        self.end()
        return True

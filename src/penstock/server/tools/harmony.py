"""Harmony, the form of gpt-oss: messages with a channel, and a recipient where they call a tool.

    <|channel|>analysis<|message|>The user asks for …<|end|><|start|>assistant<|channel|>commentary
     to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

`analysis` is reasoning; `final`, and `commentary` without a recipient, are the answer. Source:
OpenAI, "Harmony response format", and the chat template of gpt-oss.
"""

from __future__ import annotations

import re

from penstock.server.tools.events import Reasoning
from penstock.server.tools.reader import CallReader, Marks, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_MOST_HEADER = 512
_HEADERS = Marks(CHANNEL, START)
_ENDS = Marks(END, RETURN, CALL, START)
_CHANNEL_NAME = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANY_RECIPIENT = re.compile(r"\bto=")


class HarmonyReader(CallReader):
    """Reads messages, the first of which may lack `<|start|>assistant`, as prompts end in it."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        yield from self.space()
        spaces, self._raw = self._raw, []
        if (yield from self.peek()) == "t" and (yield from self.literal("to=functions.")):
            self._raw = ["to=functions."]
            yield from self._message()
        else:
            self._gap += "".join(spaces)
        while (mark := (yield from self.text_until(_HEADERS))) is not None:
            if mark == CHANNEL or (yield from self._is_assistant()):
                yield from self._message()
            else:
                self.refuse()

    def _is_assistant(self) -> Reading[bool]:
        return (yield from self.literal("assistant"))

    def _message(self) -> Reading[None]:
        """The rest of a header, and what is said under it."""
        rest = yield from self.until(MESSAGE, _MOST_HEADER)
        if rest is None:
            self.refuse()
            return
        header = "".join(self._raw)
        channel, tool = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if tool is not None and self.is_name(tool[1]):
            self.begin(tool[1])
            if (yield from self.object_of_arguments()):
                self.end()
                yield from self.closing(CALL)
            else:
                self.refuse()
        elif _ANY_RECIPIENT.search(header):  # a built-in tool, which nobody offers
            self.refuse()
        elif channel is not None and channel[1] == "analysis":
            yield from self._thought()
        else:
            self._raw = []
            yield from self._said()

    def _thought(self) -> Reading[None]:
        while True:
            found = _ENDS.search(self._text, self._at)
            held = 0 if self._ended else _ENDS.held(self._text, self._at)
            text = self._take(found.start() if found else len(self._text) - held)
            if text:
                self._events.append(Reasoning(text))
            if found:
                if found.group() != START:
                    self._take(found.end())
                return
            if self._ended:
                return
            yield

    def _said(self) -> Reading[None]:
        """A part of the answer; what ends it isn't shown."""
        mark = yield from self.text_until(_ENDS)
        if mark == START:
            self.back(len(START))

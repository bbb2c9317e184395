"""Calls as Python writes them: Llama 3.2 and 4, ToolACE, xLAM, LFM2.

    [get_weather(city="Paris", days=3), get_time(zone="CET")]

Llama 4 may put them between `<|python_start|>` and `<|python_end|>`. Nothing marks a call, so only
a tool that is offered makes one. Arguments are Python's literals, or JSON's. Source: Meta, prompt
formats of Llama 3.2 and Llama 4, "Zero-shot function calling".

LFM2 marks its lists: `<|tool_call_start|>[…]<|tool_call_end|>`. Source: its cards, "Tool use".
"""

from __future__ import annotations

import json
import re

from penstock.server.tools.python_literal import as_json
from penstock.server.tools.reader import CallReader, Marks, Reading

START, STOP = "<|python_start|>", "<|python_end|>"
_STARTS = Marks("[", START)
LFM2_START, LFM2_STOP = "<|tool_call_start|>", "<|tool_call_end|>"
_LFM2_STARTS = Marks(LFM2_START)
_NAME = re.compile(r"[\w.\-]")
_MOST_NAME = 256


class PythonicReader(CallReader):
    """Reads lists of calls; an argument is passed on when it is whole."""

    bare = True

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (mark := (yield from self.text_until(_STARTS))) is not None:
            if mark == START:
                yield from self.space()
                if not (yield from self.literal("[")):
                    self.refuse()
                    continue
            if not (yield from self._list()):
                self.refuse()
            else:
                yield from self.closing(STOP)

    def _list(self) -> Reading[bool]:
        calls = self.calls
        while True:
            yield from self.space()
            if self.calls > calls and (yield from self.literal("]")):
                return True  # behind a last comma
            name = yield from self.take_matching(_NAME, _MOST_NAME)
            if not self.is_name(name) or not (yield from self.literal("(")):
                return False
            self.begin(name)
            if not (yield from self._arguments()):
                return False
            self.end()
            if (yield from self.closing("]")):
                return True
            if not (yield from self.closing(",")):
                return True  # cut off behind a call

    def _arguments(self) -> Reading[bool]:
        self.argue("{")
        seen: set[str] = set()
        while True:
            yield from self.space()
            if (yield from self.literal(")")):
                self.argue("}")
                return True
            key = yield from self.take_matching(_NAME, _MOST_NAME)
            yield from self.space()
            if not key or key in seen or not (yield from self.literal("=")):
                return False
            text = yield from self._literal_text()
            try:
                value = as_json(text)
            except ValueError:
                return False
            separator = ", " if seen else ""
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            seen.add(key)
            if (yield from self.literal(",")):
                continue
            if (yield from self.peek()) != ")":
                return False

    def _literal_text(self) -> Reading[str]:
        """Up to the comma or the parenthesis behind an argument, which stay; or to the end."""
        parts: list[str] = []
        quote, escaped, depth = "", False, 0
        while True:
            end = self._at
            while end < len(self._text):
                character = self._text[end]
                if quote:
                    if not escaped and character == quote:
                        quote = ""
                    escaped = character == "\\" and not escaped
                elif character in "'\"":
                    quote = character
                elif depth == 0 and character in ",)":
                    break
                else:
                    depth += (character in "([{") - (character in ")]}")
                end += 1
            parts.append(self._take(end))
            self._raw.append(parts[-1])
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield


class Lfm2Reader(PythonicReader):
    """Reads lists of calls between marks."""

    bare = False

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (yield from self.text_until(_LFM2_STARTS)) is not None:
            yield from self.space()
            if not (yield from self.literal("[")) or not (yield from self._list()):
                self.refuse()
            else:
                yield from self.closing(LFM2_STOP)

"""Hermes' form, which Qwen2.5 and Qwen3 have too.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One such block a call. Source: NousResearch, Hermes-Function-Calling (model cards of Hermes 2 Pro
and 3); the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

from penstock.server.tools.reader import CallReader, Marks, Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN = Marks(OPEN)


class HermesReader(CallReader):
    """Reads blocks of JSON; the closing tag may be missing, and a block may hold several calls."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (yield from self.text_until(_OPEN)) is not None:
            yield from self.space()
            while (yield from self.call_of_object()):
                if (yield from self.closing(CLOSE)) or (yield from self.peek()) != "{":
                    break
            else:
                self.refuse()

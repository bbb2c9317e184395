"""DeepSeek's forms, made of its own special tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

so V3 and R1 write. V3.1 has the name before the separator, and no fence:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…

Source: the chat templates of DeepSeek-V3, R1 and V3.1.
"""

from __future__ import annotations

from penstock.server.tools.reader import CallReader, Marks, Reading

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
_OPEN = Marks(CALLS_BEGIN, CALL_BEGIN)
_MOST_NAME = 256


class DeepSeekReader(CallReader):
    """Reads both forms."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (mark := (yield from self.text_until(_OPEN))) is not None:
            if mark == CALLS_BEGIN:
                yield from self.space()
                if not (yield from self.literal(CALL_BEGIN)):
                    self.refuse()
                    continue
            if not (yield from self._call()):
                self.refuse()
                continue
            yield from self.closing(CALL_END)
            yield from self.closing(CALLS_END)

    def _call(self) -> Reading[bool]:
        name = yield from self.until(SEPARATOR, _MOST_NAME)
        if name is None:
            return False
        fenced = False
        if name.strip() == "function" and (yield from self.peek()) != "{":
            name = yield from self.until("\n", _MOST_NAME)
            if name is None or not (yield from self.literal(FENCE)):
                return False
            fenced = True
        yield from self.space()
        name = name.strip()
        if not self.is_name(name) or (yield from self.peek()) != "{":
            return False
        self.begin(name)
        if not (yield from self.object_of_arguments()):
            return False
        self.end()
        if fenced:
            yield from self.closing(FENCE_END)
        return True

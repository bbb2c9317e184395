"""Llama 3's JSON.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Sometimes behind `<|python_tag|>`; several are separated by semicolons. But for the tag nothing
marks a call, so it begins the message or follows another one: an object within text, or within
another object, is a part of the answer. Source: Meta, prompt formats of Llama 3.1 to 3.3, "JSON
based tool calling", and the models' chat templates.
"""

from __future__ import annotations

from penstock.server.tools.reader import CallReader, Marks, Reading

TAG = "<|python_tag|>"
_TAG = Marks(TAG)


class Llama3JsonReader(CallReader):
    """Reads objects that have an offered tool's name."""

    bare = True

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while True:
            yield from self.space()
            if (yield from self.peek()) == "{" and (yield from self.call_of_object()):
                yield from self.closing(";")
                continue
            self.refuse()
            if (yield from self.text_until(_TAG)) is None:
                return

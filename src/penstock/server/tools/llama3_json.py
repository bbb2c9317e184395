"""Llama 3's JSON.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Sometimes behind `<|python_tag|>`; several are separated by semicolons. Nothing marks a call, so
only a tool that is offered makes one. Source: Meta, prompt formats of Llama 3.1 to 3.3, "JSON based
tool calling", and the models' chat templates.
"""

from __future__ import annotations

from penstock.server.tools.reader import CallReader, Marks, Reading

TAG = "<|python_tag|>"
_STARTS = Marks("{", TAG)


class Llama3JsonReader(CallReader):
    """Reads objects that have an offered tool's name."""

    bare = True

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (mark := (yield from self.text_until(_STARTS))) is not None:
            if mark == "{":
                self.back(1)
            else:
                yield from self.space()
            if (yield from self.call_of_object()):
                yield from self.closing(";")
            else:
                self.refuse()

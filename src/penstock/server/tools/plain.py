"""Text without calls, and special tokens that nobody is to see."""

from __future__ import annotations

from collections.abc import Collection

from penstock.server.tools.reader import CallReader, Marks, Reading


class PlainReader(CallReader):
    """Reads an answer in which no calls are looked for."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while not self._ended:
            self._show(self._take(len(self._text)))
            yield
        self._show(self._take(len(self._text)))
        self._end_text()


class SpecialFilter:
    """Leaves out the special tokens that a reader doesn't look for.

    A reader that needs some of them gets all (`skip_special_tokens` knows only all or none).
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._marks = Marks(*hidden) if hidden else None
        self._left = ""

    def feed(self, text: str, *, ended: bool = False) -> str:
        """What may be seen of it now."""
        if self._marks is None:
            return text
        self._left += text
        parts, at = [], 0
        while found := self._marks.search(self._left, at):
            parts.append(self._left[at : found.start()])
            at = found.end()
        end = len(self._left) - (0 if ended else self._marks.held(self._left, at))
        parts.append(self._left[at:end])
        self._left = self._left[end:]
        return "".join(parts)

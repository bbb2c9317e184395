"""Server-sent events out of bytes, however the network cuts them.

Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream".
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SseParser:
    """Gives the data of each complete event; comments and all other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # of the event at hand
        self._after_return = False  # a line feed now belongs to the carriage return before it
        self._started = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end within `data`, in order.

        As the standard says, an event is complete with the empty line after it: what a
        connection's end cuts off is never given.
        """
        if self._after_return and data:
            self._after_return = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if not self._started:
                self._started = True
                line = line.removeprefix(_BOM)
            if line.startswith(b"data:"):
                value = line[5:]
                self._data.append(value[1:] if value[:1] == b" " else value)
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

"""The output of a response: reasoning, messages and calls, as items and as the events for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.server.routes.tools import Answering, Calls

_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Items:
    """Makes items from text; each begins when there is something for it.

    tell: writes an event; name: of the response, from which items have theirs; part: a message's
    text as the API has it.
    """

    def __init__(
        self,
        how: Answering,
        tell: Callable[..., bytes],
        name: str,
        part: Callable[[str], dict[str, Any]],
        *,
        drops_broken: bool = False,
    ) -> None:
        """drops_broken: a call that turns out to be none leaves no item."""
        self._drops_broken = drops_broken
        self.done: list[dict[str, Any]] = []
        self._deltas = Calls(how)
        self._apart = how.plan.offer.apart
        self._tell, self._name, self._part = tell, name, part
        self._kind = ""  # of the item that is open
        self._index = 0  # of the call, where it is one
        self._id = self._call = ""
        self._tool: dict[str, str] = {}  # its name, and its namespace
        self._said: list[str] = []

    def start(self) -> Iterator[bytes]:
        """A message begins before there is text for it, as it does where nothing else can come."""
        yield from self._in("message")

    def of(self, text: str, ended: bool, logprobs: list[Any]) -> Iterator[bytes]:
        """What new text says; log-probabilities go with the text that comes first."""
        for delta in self._deltas.deltas(text, ended):
            if "tool_calls" in delta:
                (call,) = delta["tool_calls"]
                function = call["function"]
                if "id" in call:
                    yield from self.close()
                    self._index = call["index"]
                    yield self._open("function_call", call["id"], function["name"])
                if function["arguments"]:
                    yield self._more(
                        "response.function_call_arguments.delta", function["arguments"]
                    )
            elif "reasoning" in delta:
                yield from self._in("reasoning")
                yield self._more(
                    "response.reasoning_text.delta", delta["reasoning"], content_index=0
                )
            else:
                yield from self._in("message")
                yield self._more(
                    "response.output_text.delta", delta["content"], content_index=0,
                    logprobs=logprobs,
                )  # fmt: skip
                logprobs = []
        if logprobs and self._kind == "message":  # tokens that show nothing yet
            yield self._more("response.output_text.delta", "", content_index=0, logprobs=logprobs)

    def finish(self, status: str) -> Iterator[bytes]:
        """The output has ended; one that said nothing is an empty message."""
        if not (self._kind or self.done):
            yield from self._in("message")
        yield from self.close(status)

    def close(self, status: str = "completed") -> Iterator[bytes]:
        """The open item ends."""
        if not self._kind:
            return
        kind, text, where = self._kind, "".join(self._said), self._where
        if kind == "function_call" and self._index not in self._deltas.ended:
            if self._drops_broken:  # all of its text is content
                self._kind = ""
                return
            status = "incomplete"
        item = self._item(text, status)
        if kind == "function_call":
            yield self._tell(
                "response.function_call_arguments.done", **where, **self._tool, arguments=text
            )
        elif kind == "reasoning":
            inner = {**where, "content_index": 0}
            yield self._tell("response.reasoning_text.done", **inner, text=text)
            yield self._tell("response.content_part.done", **inner, part=item["content"][0])
        else:
            part = item["content"][0]
            inner = {**where, "content_index": 0}
            yield self._tell(
                "response.output_text.done", **inner, text=text, logprobs=part["logprobs"]
            )
            yield self._tell("response.content_part.done", **inner, part=part)
        yield self._tell("response.output_item.done", output_index=where["output_index"], item=item)
        self.done.append(item)
        self._kind = ""

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done)}

    def _in(self, kind: str) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.close()
        yield self._open(kind)
        (part,) = self._item("", "in_progress")["content"]
        yield self._tell("response.content_part.added", **self._where, content_index=0, part=part)

    def _open(self, kind: str, call: str = "", tool: str = "") -> bytes:
        count = len(self.done)
        self._kind, self._call, self._tool, self._said = kind, call, self._apart(tool), []
        self._id = f"{_KINDS[kind]}_{self._name}" + (f"_{count}" if count else "")
        item = self._item("", "in_progress")
        if kind != "function_call":
            item["content"] = []
        return self._tell("response.output_item.added", output_index=count, item=item)

    def _more(self, name: str, text: str, **data: Any) -> bytes:
        self._said.append(text)
        return self._tell(name, **self._where, **data, delta=text)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"type": self._kind, "id": self._id, "status": status}
        if self._kind == "function_call":
            return item | {"call_id": self._call, **self._tool, "arguments": text}
        if self._kind == "reasoning":
            return item | {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        return item | {"role": "assistant", "content": [self._part(text)]}

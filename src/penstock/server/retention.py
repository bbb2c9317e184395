"""Which turns of a conversation go where it is too long: some more than need be, so that the next
requests find what is left of it in the cache.

A server keeps nothing of a conversation, and where the oldest turn goes with each request, none
begins as the one before did. So it is played through: where a request must have been too long,
turns went until a share of the room was left, and the next ones left out the same until they were
too long again. Every request of a conversation comes to the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

_REASONED = re.compile(r"<think>.*?</think>", re.DOTALL)
_PER_TOKEN = 16  # characters that one token has at most, about
_ROOMS = 32  # contexts' lengths of a conversation that are played through, at most


class Retention:
    """Plays one conversation through."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        render: Callable[[list[dict[str, Any]]], tuple[str, list[int]]],
        max_len: int,
        reserve: int,
    ) -> None:
        """encode: a text's own tokens; render: messages' text and tokens, as the template has them.

        reserve: tokens that shall fit behind a prompt.
        """
        self._encode, self._render = encode, render
        self._max_len, self._reserve = max_len, reserve

    def whole(self, plain: list[dict[str, Any]]) -> tuple[str, list[int]] | None:
        """The conversation's text and tokens, unless it is plainly or in fact too long."""
        if sum(map(len, map(text_of, plain))) > _PER_TOKEN * self._max_len:
            return None
        text, ids = self._render(plain)
        return (text, ids) if len(ids) + self._reserve <= self._max_len else None

    def first_kept(self, plain: list[dict[str, Any]], starts: list[int], retention: float) -> int:
        """Which of `starts` is the first, by messages' own tokens, and what the template writes
        around each."""
        head, one, two = plain[: starts[0]], _said("user"), [_said("assistant"), _said("user")]
        own = len(self._encode(one["content"]))
        least = self._tokens([*head, one])
        around = max((self._tokens([*head, one, *two]) - least) // 2 - own, 0)  # of each message
        sizes, total = [0] * len(plain), 0
        for at in range(len(plain) - 1, starts[0] - 1, -1):  # of far longer ones, their ends
            if total > _ROOMS * self._max_len:
                break
            sizes[at] = self._size(plain[at], around)
            total += sizes[at]
        room = self._max_len - reserved(self._reserve, self._max_len)
        ends = [i + 1 for i, m in enumerate(plain) if m["role"] != "assistant" and i >= starts[0]]
        if not ends or ends[-1] != len(plain):
            ends.append(len(plain))
        return first_kept(sizes, starts, ends, least - own - around, room, retention)

    def _tokens(self, messages: list[dict[str, Any]]) -> int:
        return len(self._render(messages)[1])

    def _size(self, message: dict[str, Any], around: int) -> int:
        text = text_of(message)
        if len(text) > _PER_TOKEN * self._max_len:
            return len(text) // 4  # too long, whatever it is
        return around + len(self._encode(text))


def reserved(reserve: int, max_len: int) -> int:
    """What is left for an answer, in eighths: what requests want to be said hardly matters."""
    eighth = max(max_len // 8, 1)
    return min(-(-reserve // eighth) * eighth, max_len - 1)


def starts_of(plain: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where a conversation may begin after the system's messages: there, or at a user's turn."""
    head = 0
    while head < len(plain) and plain[head]["role"] == "system":
        head += 1
    return [head, *(i for i in range(head + 1, len(plain)) if plain[i]["role"] == "user")]


def _said(role: str) -> dict[str, Any]:
    """A message of next to nothing."""
    return {"role": role, "content": "a"}


def text_of(message: Mapping[str, Any]) -> str:
    """What of a message is text, about."""
    content, calls = message["content"], message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    if message["role"] == "assistant":  # which templates leave out of earlier answers
        content = _REASONED.sub("", content or "")
    return f"{content or ''}{json.dumps(calls) if calls else ''}"


def first_kept(
    sizes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    fixed: int,
    room: int,
    retention: float,
) -> int:
    """Which of `starts` the last request of a conversation begins with.

    sizes: tokens of each message. starts: messages that a prompt may begin with, the first behind
    what always stays, which has `fixed` tokens. ends: behind the last message of each request,
    ascending. room: tokens of a prompt. retention: the share of it that is kept where it was too
    long.
    """
    before, at = [0, *accumulate(sizes)], 0
    for end in ends:
        if fixed + before[end] - before[starts[at]] <= room:
            continue
        while (
            at + 1 < len(starts)
            and starts[at + 1] < end
            and fixed + before[end] - before[starts[at]] > retention * room
        ):
            at += 1
    return at

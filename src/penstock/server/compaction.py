"""Conversations that grow too long, and what stands for their older turns: a summary, by the model.

A server keeps no conversation, so each is played through from its messages: where a request's
prompt passed the threshold, the older turns made way for a summary, and the next requests begin
with that one until they pass it again. The model is asked greedily and its answers are a function
of the prompt alone, so every request of a conversation comes to the same summaries; those that were
written lately are remembered, and nobody writes them twice.

What stays: the system's messages, and the latest turns, whole. A call of a tool and what came of it
are never parted. Sources: OpenAI's Responses API (`context_management`, `/v1/responses/compact`);
a summary in place of turns that were summarised before, recursively, Wang et al. 2023,
arXiv:2308.15022.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from penstock.models.vision.pictures import Picture
from penstock.server.config import LEAST_THRESHOLD
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import Message
from penstock.server.remembered import Remembered
from penstock.server.retention import reserved, text_of

IMPOSSIBLE = "compaction_impossible"
"""Of errors: what the API calls them."""
MOST_PASSES = 64
"""Summaries that one request may have written."""
_MOST_SUMMARY = 2048  # tokens
_SHARE = 8  # of the threshold that a summary may have: one in so many
_PER_TOKEN = 16  # characters that one token has at most, about
_SYSTEM = ("system", "developer")
_ASK = "Summarize our conversation so far."
_INSTRUCTIONS = (
    "Summarize our conversation so far, so that it can go on from your summary alone: what was "
    "asked for, what was said, found and decided, names and numbers, and what is left to do. Write "
    "the summary and nothing else, in at most {words} words."
)
Plain = dict[str, Any]
Render = Callable[[list[Plain]], tuple[str, list[int]]]


@dataclass(slots=True)
class Spent:
    """What summaries have cost a request, and what they stand for."""

    messages: int = 0  # that a summary stands for
    passes: int = 0  # summaries that were written for this request
    input_tokens: int = 0
    cached_tokens: int = 0  # of those, found in the cache
    output_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """As answers tell it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the summary that comes between the system's and the others."""

    messages: Sequence[Message]
    summary: str | None = None

    @property
    def written(self) -> list[Message]:
        """All as messages: a summary is what the assistant said when it was asked for one."""
        if self.summary is None:
            return list(self.messages)
        return [*self.system, *_told(self.summary), *self.others]

    @property
    def system(self) -> list[Message]:
        """The system's messages, wherever they stand."""
        return [m for m in self.messages if m.role in _SYSTEM]

    @property
    def others(self) -> list[Message]:
        """All but the system's."""
        return [m for m in self.messages if m.role not in _SYSTEM]


def _told(summary: str) -> tuple[Message, Message]:
    """Question and answer, which any template can write: users and assistants take turns."""
    return Message(role="user", content=_ASK), Message(role="assistant", content=summary)


@dataclass(frozen=True, slots=True)
class Wanted:
    """When a conversation is compacted.

    threshold: tokens of a prompt; param: the field that says so, for errors; name: what it is
    called there; forced: now, whatever it has; instructions: what is asked for instead.
    """

    threshold: int
    param: str | None
    name: str
    forced: bool = False
    instructions: str | None = None


@dataclass(frozen=True, slots=True)
class Writing:
    """How a conversation is written, and how for the model that shall summarise it.

    plain, asking: its messages, one by one. render, ask: their text and tokens. count: tokens of a
    text alone. salt: of all else that summaries depend on.
    """

    plain: Sequence[Plain]
    asking: Sequence[Plain]
    render: Render
    ask: Render
    count: Callable[[str], int]
    salt: bytes


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that asks for a summary."""

    messages: list[Plain]
    text: str
    tokens: list[int]


@dataclass(slots=True)
class _Step:
    """A summary that is being written."""

    end: int  # behind the last message of the request that was too long
    cut: int  # the first message that stays
    upto: int = 0  # the first that this pass leaves for the next


class Play:
    """One conversation, played through: `next` says what shall be summarised, `told` how it was.

    Positions count the messages that aren't the system's.
    """

    def __init__(
        self,
        conversation: Conversation,
        writing: Writing,
        wanted: Wanted,
        remembered: Remembered,
        max_len: int,
        reserve: int,
    ) -> None:
        """max_len: tokens that the model takes; reserve: of these, those that an answer wants."""
        self.conversation, self.writing, self.wanted = conversation, writing, wanted
        self._remembered, self._max_len, self._reserve = remembered, max_len, reserve
        room = max(max_len - reserved(reserve, max_len), min(max_len - reserve, max_len // 8))
        self._room = room  # of a prompt, beside an answer
        self.threshold = min(wanted.threshold, room)
        self.most = _most_of(self.threshold)  # tokens of a summary
        self.passes = 0
        self._start = 0  # the first message that no summary stands for
        self._seen = 0  # requests up to here fit, or are as short as can be
        self._step: _Step | None = None
        self._summary = conversation.summary
        self._forced = wanted.forced
        self._keys: list[bytes] = []
        self._head: list[int] = []  # where the system's messages stand
        self._body: list[int] = []
        for i, message in enumerate(conversation.messages):
            (self._head if message.role in _SYSTEM else self._body).append(i)
        self._roles = [conversation.messages[i].role for i in self._body]
        self._ends = _ends(self._roles)
        shown = writing.plain
        self._around = sum(len(text_of(shown[i])) for i in self._head)  # characters
        self._before = [0, *accumulate(len(text_of(shown[i])) for i in self._body)]

    @property
    def result(self) -> tuple[Conversation, int]:
        """(what is left, how many messages its summary stands for more than before)."""
        messages = self.conversation.messages
        kept = [messages[i] for i in (*self._head, *self._opening(self._start))]
        kept += [messages[i] for i in self._body[self._start :]]
        if self._start == 0:
            return self.conversation, 0
        return Conversation(kept, self._summary), len(messages) - len(kept)

    def next(self) -> Question | None:
        """What asks for a summary, of `most` tokens; None: there is nothing more to do.

        Raises ApiError for what can't be summarised.
        """
        if self._step is None and not self._find():
            return None
        if self.passes >= MOST_PASSES or (self.passes == 0 and self._needs_too_many()):
            raise self._error(
                f"The conversation's {len(self._body):,} messages need more than {MOST_PASSES} "
                f"summaries, each of what fits into {self._max_len:,} tokens. Leave out its oldest "
                "turns, or send its parts to /v1/responses/compact one after the other."
            )
        return self._take()

    def told(self, summary: str) -> None:
        """The answer."""
        step = self._step
        assert step is not None
        self._start, self._summary = step.upto, summary
        if self._start == step.cut:
            self._step, self._seen = None, step.end
            if not self.wanted.forced:
                self._remembered.put(self._keys[step.end], self._start, summary)

    def _take(self) -> Question:
        """The step's next summary."""
        step = self._step
        assert step is not None
        self.passes += 1
        step.upto = self._as_much_as_fits(step.cut)
        asked = self._asked(step.upto)
        return Question(asked, *self.writing.ask(asked))

    def _needs_too_many(self) -> bool:
        """Whether there would be too many summaries even if all of them were empty.

        By the messages' sizes, without what a template writes around them: some that need a few
        too many, or have next to nothing in very many messages, are told so only on the way.
        """
        if self._before[-1] - self._before[self._start] < MOST_PASSES * self.threshold // 4:
            return False  # each stands for more than that
        trial, known = copy(self), dict[int, int]()
        own = {id(message) for message in (*self.writing.plain, *self.writing.asking)}

        def sized(messages: list[Plain]) -> tuple[str, list[int]]:
            for message in messages:
                if id(message) in own and id(message) not in known:
                    known[id(message)] = self.writing.count(text_of(message))
            return "", [0] * sum(known.get(id(message), 0) for message in messages)

        assert self._step is not None
        trial.writing = replace(self.writing, render=sized, ask=sized)
        trial._remembered, trial._step = Remembered(), replace(self._step)
        try:
            while trial.passes < MOST_PASSES:
                if not trial._goes_on():
                    return False
        except ApiError:  # which the conversation itself will come to, or not
            return False
        return True

    def _goes_on(self) -> bool:
        """Whether there is more to summarise, after a summary of nothing."""
        self._take()
        self.told("")
        return self._step is not None or self._find()

    # ── which turns ──────────────────────────────────────────────────────────────────────────

    def _find(self) -> bool:
        """Whether there is a step to take."""
        if self._forced:
            self._forced = False
            found = self._latest_cut()
            if found is None:
                raise self._error(
                    f"There is nothing to summarise: of {len(self._body):,} beside the system's no "
                    "message is older than the last turn, which stays as it is (messages of the "
                    "user's in a row are one turn). Send it once there are older ones."
                )
            self._step = _Step(len(self._body), found)
            return True
        if self.wanted.forced or not self._passes(len(self._body)):
            return False
        if not self._keys:
            self._recall()
        while True:
            end = self._first_too_long()
            if end is None:
                return False
            cut = self._cut(end)
            if cut is not None:
                self._step = _Step(end, cut)
                return True
            self._seen = end

    def _recall(self) -> None:
        """Begin where an earlier request of this conversation has got."""
        digest = hashlib.sha256(self.writing.salt)
        digest.update(_as_json([self.threshold, self._summary, self.wanted.instructions]))
        self._keys = []
        for end, i in enumerate([*self._body, len(self.writing.plain)]):
            for message in self.writing.plain[self._body[end - 1] if end else 0 : i]:
                digest.update(_as_json(message))
            self._keys.append(digest.digest())
        for end in range(len(self._body), 0, -1):
            found = self._remembered.get(self._keys[end])
            if found is not None:
                self._start, self._summary = found
                self._seen = end
                return

    def _first_too_long(self) -> int | None:
        """Behind the last message of the first request that passes the threshold."""
        ends = self._ends[bisect_right(self._ends, self._seen) :]
        if not ends or not self._passes(ends[-1]):
            return None
        high = 1
        while high < len(ends) and not self._passes(ends[high - 1]):
            high *= 2
        high = min(high, len(ends))
        return ends[bisect_left(ends, True, high // 2, high - 1, key=self._passes)]

    def _cut(self, end: int) -> int | None:
        """The first message that stays, where the request up to `end` is too long.

        As many turns as half of the threshold holds, beside a summary; the last one in any case,
        whole if it fits; else of its calls with what came of them as many, and the last. None:
        there is nothing older. Raises ApiError where there is no room for a summary.
        """
        turns, calls = self._boundaries(end)
        if not turns and not calls:
            return None
        least = self._kept(end, end)
        if least > self.threshold:
            raise self._no_room(least)
        for found in (turns, calls):
            at = bisect_left(found, True, key=lambda c: self._kept(c, end) <= self.threshold // 2)
            if at < len(found):
                return found[at]
            if found and (not calls or self._kept(found[-1], end) <= self.threshold):
                return found[-1]
        return (calls or turns)[-1]

    def _no_room(self, least: int) -> ApiError:
        what = f"the system's messages, tools and a summary of up to {self.most:,} tokens take"
        beside = (
            f"eside an answer of up to {self._reserve:,} tokens a prompt may have "
            f"{self._room:,} of this model's {self._max_len:,}"
        )
        if self.threshold < self.wanted.threshold:
            return self._error(
                f"B{beside}, but {what} {least:,}. Shorten them, or ask for a shorter answer."
            )
        words = f"{self.wanted.name} is {self.threshold:,} tokens, but {what} {least:,}."
        if least - self.most + _most_of(self._room) > self._room:
            return self._error(f"{words} Shorten them: b{beside}.")
        enough = min(2 * least, self._room)
        return self._error(f"{words} Raise it to {enough:,} or more, or shorten them.")

    def _latest_cut(self) -> int | None:
        turns, calls = self._boundaries(len(self._body))
        found = turns or calls
        return found[-1] if found else None

    def _boundaries(self, end: int) -> tuple[list[int], list[int]]:
        """(where turns of the user begin, where the assistant goes on after calls in the last one),
        of what no summary stands for."""
        turns: list[int] = []
        calls: list[int] = []
        for i in range(self._start + 1, end):
            role, before = self._roles[i], self._roles[i - 1]
            if role == "user" and before != "user":
                turns.append(i)
                calls = []
            elif role == "assistant" and before == "tool":
                calls.append(i)
        return turns, calls

    def _all_boundaries(self, end: int) -> list[int]:
        """Both, of all turns."""
        between = zip(self._roles, self._roles[1:], strict=False)
        starts = [i + 1 for i, (before, role) in enumerate(between)
                  if (role == "user" and before != "user")
                  or (role == "assistant" and before == "tool")]  # fmt: skip
        return starts[bisect_right(starts, self._start) : bisect_left(starts, end)]

    def _opening(self, cut: int) -> list[int]:
        """What the user said at the beginning of the turn that is cut here; nothing between two."""
        if not 0 < cut < len(self._roles) or self._roles[cut] == "user":
            return []
        end = cut
        while end > 0 and self._roles[end - 1] != "user":
            end -= 1
        start = end
        while start > 0 and self._roles[start - 1] == "user":
            start -= 1
        return self._body[start:end]

    # ── how many tokens ──────────────────────────────────────────────────────────────────────

    def _passes(self, end: int) -> bool:
        """Whether the prompt of the request up to `end` is above the threshold."""
        return self._tokens(self._summary, self._start, end) > self.threshold

    def _kept(self, cut: int, end: int) -> int:
        """Tokens of a prompt that has a summary before `cut`."""
        return self._tokens("", cut, end) + self.most

    def _tokens(self, summary: str | None, start: int, end: int) -> int:
        """Of a prompt; of one that is far too long, about."""
        characters = self._around + self._before[end] - self._before[start]
        if characters > _PER_TOKEN * max(self.threshold, LEAST_THRESHOLD):
            return characters // 4
        plain = self.writing.plain
        told = () if summary is None else _plain_told(summary)
        opening = self._opening(start) if start < end else []
        places = (*opening, *self._body[start:end])
        shown = [*(plain[i] for i in self._system(end)), *told, *(plain[i] for i in places)]
        return len(self.writing.render(shown)[1])

    def _system(self, end: int) -> list[int]:
        """The system's messages that a request up to `end` has."""
        if end == len(self._body):
            return self._head
        return self._head[: bisect_left(self._head, self._body[end])]

    # ── what is asked ────────────────────────────────────────────────────────────────────────

    def _as_much_as_fits(self, cut: int) -> int:
        """Up to where one pass can summarise. Raises ApiError where it is nowhere."""
        if self._asked_tokens(cut) + self.most <= self._max_len:
            return cut
        ends = self._all_boundaries(cut)
        at = bisect_right(ends, self._max_len - self.most, key=self._asked_tokens)
        if at:
            return ends[at - 1]
        upto = ends[0] if ends else cut
        raise self._error(
            f"A part of the conversation that can't be parted ({upto - self._start} messages "
            f"from the {_ordinal(self._start + 1)} beside the system's) has about "
            f"{self._asked_tokens(upto):,} tokens as it would be summarised, and with a summary of "
            f"up to {self.most:,} the model takes {self._max_len:,}. Shorten or leave out these "
            "messages."
        )

    def _asked_tokens(self, upto: int) -> int:
        characters = self._around + self._before[upto] - self._before[self._start]
        if characters > _PER_TOKEN * self._max_len:
            return characters // 4
        return len(self.writing.ask(self._asked(upto))[1])

    def _asked(self, upto: int) -> list[Plain]:
        asking, step = self.writing.asking, self._step
        assert step is not None
        told = () if self._summary is None else _plain_told(self._summary)
        places = (*self._opening(self._start), *self._body[self._start : upto])
        head = (asking[i] for i in self._system(step.end))
        made = [*head, *told, *(asking[i] for i in places)]
        wanted = self.wanted.instructions
        if wanted is None:
            wanted = _INSTRUCTIONS.format(words=max(self.most // 2, 8))
        last = made[-1]
        if last["role"] == "user" and isinstance(last["content"], str):
            return [*made[:-1], {**last, "content": f"{last['content']}\n\n{wanted}"}]
        return [*made, {"role": "user", "content": wanted}]

    def _error(self, what: str) -> ApiError:
        return ApiError(400, what, param=self.wanted.param, code=IMPOSSIBLE)


def _most_of(threshold: int) -> int:
    """Tokens of a summary beside it."""
    return max(min(threshold // _SHARE, _MOST_SUMMARY), 1)


def _ends(roles: Sequence[str]) -> list[int]:
    """Behind the last messages of the requests of a conversation, ascending."""
    after = [*roles[1:], ""]
    ends = [i + 1 for i, (role, then) in enumerate(zip(roles, after, strict=True))
            if role != "assistant" and then != "tool"]  # fmt: skip
    if roles and (not ends or ends[-1] != len(roles)):
        ends.append(len(roles))
    return ends


def _plain_told(summary: str) -> tuple[Plain, Plain]:
    return {"role": "user", "content": _ASK}, {"role": "assistant", "content": summary}


def _as_json(said: Any) -> bytes:
    """For a digest: each kind of value apart from each other."""
    return json.dumps(said, sort_keys=True, default=_of_picture).encode() + b"\0"


def _of_picture(picture: Picture) -> int:
    return picture.key


def _ordinal(number: int) -> str:
    tens, ones = divmod(number, 10)
    ending = "th" if tens % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(ones, "th")
    return f"{number:,}{ending}"

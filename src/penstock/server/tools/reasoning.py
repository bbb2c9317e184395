"""Reasoning before the answer: `<think>…</think>` and what looks like it.

The tags are DeepSeek-R1's, and those of Qwen3, QwQ, GLM, Kimi and others after it; Magistral has
`[THINK]…[/THINK]`, Gemma 4 a channel with a name. Prompts often end in the opening tag, so that
only the closing one is written.

Some models call a tool without having closed their reasoning, or before they do. Such calls count
if the answer has none of its own; what is then written about them stays in the reasoning. Source:
DeepSeek-AI 2025, "DeepSeek-R1", arXiv:2501.12948, table 1; the models' chat templates.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.tools.events import Arguments, Begin, End, Event, Reasoning
from penstock.server.tools.reader import CallReader, Marks


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """What stands around the reasoning."""

    open: str
    close: str
    label: str = ""  # behind the opening tag: what kind of text follows

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening tag, so that an answer begins with reasoning."""
        return prompt.rstrip().endswith(self.open)

    def left_open(self, text: str) -> bool:
        """Whether a turn that is to go on is still reasoning."""
        return text.rfind(self.open) > text.rfind(self.close)


class ThinkReader:
    """Splits off the reasoning; a family's reader has the rest.

    calls: of the answer; drafts: the same once more, for the reasoning. inside: the prompt has
    opened the reasoning.
    """

    def __init__(
        self, tags: ThinkTags, inside: bool, calls: CallReader, drafts: CallReader
    ) -> None:
        self._tags = tags
        self._phase = "thinking" if inside else "start"
        self._calls = calls
        self._drafts = drafts
        self._left = ""  # not looked at
        self._close = Marks(tags.close)
        self._thought = ""  # not shown
        self._told = 0  # of what was thought
        self._begun = False  # something was thought that isn't white space
        self._labelled = False  # the label was read, or isn't there
        self._call: list[Event] = []  # in the reasoning, until it is whole
        self._found: list[Event] = []  # … those that are

    def feed(self, text: str) -> list[Event]:
        """What is known now."""
        self._left += text
        return self._advance(ended=False)

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        events = self._advance(ended=True)
        if self._phase == "thinking":
            events += self._end_thought()
        events += self._answer(self._calls.finish())
        if self._calls.calls == 0 and self._found:
            return events + self._found
        return events + self._release(len(self._thought))

    def _advance(self, ended: bool) -> list[Event]:
        events: list[Event] = []
        if self._phase == "start":
            self._start(ended)
        if self._phase == "thinking":
            events += self._think(ended)
        if self._phase == "behind":
            self._left = self._left.lstrip()
            if self._left:
                self._phase = "answer"
        if self._phase == "answer":
            text, self._left = self._left, ""
            events += self._answer(self._calls.feed(text))
        return events

    def _start(self, ended: bool) -> None:
        body, tag = self._left.lstrip(), self._tags.open
        if body.startswith(tag):
            self._left, self._phase = body[len(tag) :], "thinking"
        elif ended or not tag.startswith(body):
            self._phase = "answer"

    def _read_label(self, ended: bool) -> bool:
        """Whether it is known what is thought: the label is there or not."""
        body, label = self._left.lstrip(), self._tags.label
        if not ended and body != label and label.startswith(body):
            return False
        if label and body.startswith(label):
            self._left = body[len(label) :]
        return True

    def _think(self, ended: bool) -> list[Event]:
        self._labelled = self._labelled or self._read_label(ended)
        if not self._labelled:
            return []
        found = self._close.search(self._left, 0)
        held = 0 if ended else self._close.held(self._left, 0)
        end = found.start() if found else len(self._left) - held
        text, self._left = self._left[:end], self._left[found.end() if found else end :]
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._thought += text
        self._note(self._drafts.feed(text))
        events = self._release(self._drafts.settled - self._told)
        if found:
            self._phase = "behind"
            events += self._end_thought()
        return events

    def _end_thought(self) -> list[Event]:
        """Of what is left, calls wait for the answer; anything else is shown."""
        self._note(self._drafts.finish())
        self._thought = self._thought.rstrip()
        return [] if self._found else self._release(len(self._thought))

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Begin):
                self._call = []
            if isinstance(event, Begin | Arguments | End):
                self._call.append(event)
            if isinstance(event, End):
                self._found += self._call

    def _release(self, count: int) -> list[Event]:
        text, self._thought = self._thought[:count], self._thought[count:]
        self._told += len(text)
        return [Reasoning(text)] if text else []

    def _answer(self, events: list[Event]) -> list[Event]:
        """The reasoning's calls were drafts where the answer has one."""
        if any(isinstance(event, Begin) for event in events) and self._thought:
            return self._release(len(self._thought)) + events
        return events

"""From messages to the tokens of a prompt, and what becomes of one that is too long."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine import Pin
from penstock.engine.intake import CHARACTERS_PER_TOKEN
from penstock.errors import ChatTemplateError, InvalidPromptError
from penstock.models.vision.opening import open_pictures_of
from penstock.models.vision.pictures import Picture, Pictures
from penstock.server.errors import ApiError
from penstock.server.hints import Hints
from penstock.server.prompt import CHAT, COMPLETION, CONVERSATION, PromptText, Rendering, Source
from penstock.server.protocol.chat import Message
from penstock.server.protocol.common import CacheControl
from penstock.server.retention import Retention, starts_of
from penstock.server.tools.telling import Telling, without_calls
from penstock.server.validation import NO_SIGHT
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.tool_calls import ToolCallForm

logger = logging.getLogger("penstock.server")

# What is read of texts that may be longer than the model takes; a million characters take a second.
_MOST_CHARACTERS = 1 << 20
_TOOLS = "Send fewer tools, or shorten their descriptions and schemas."
_MOST_MARKS = 4  # of cache_control, as in Anthropic's API
# What a template is given beside a request's own variables.
_TEMPLATE_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message documents messages self "
    "tools".split()
)
# What clients send to any model, for those that can think.
_HARMLESS_VARIABLES = frozenset({"enable_thinking", "thinking"})


class Prompts:
    """Makes prompts; its methods take long for long texts, and may run in any thread."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_len: int, pictures: Pictures | None = None
    ) -> None:
        """pictures: of a model that sees some."""
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._max_len = max_len
        self.hints = Hints(tokenizer)

    def compile_templates(self, chosen: str | None) -> None:
        """Compile what conversations are written by, before a request would wait for it.

        chosen: the server's own template. One that is broken is told of in the log: requests for
        anything else are answered.
        """
        if self._tokenizer is None:
            return
        from penstock.tokenizer.chat import check_template  # and jinja2

        done = None
        for has_tools, what in ((False, "conversations"), (True, "conversations with tools")):
            source = self._tokenizer.template_source(chosen, has_tools=has_tools)
            if source is None or source == done:
                continue
            done = source
            try:
                check_template(source)
            except ChatTemplateError as error:
                logger.warning("This model can't be sent %s. %s", what, error)

    @property
    def max_len(self) -> int:
        """Tokens that the model takes."""
        return self._max_len

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError where there is none."""
        if self._tokenizer is None:
            raise ApiError(
                400,
                "This server runs without a tokenizer (skip_tokenizer_init). Send token ids.",
            )
        return self._tokenizer

    def of_text(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        source: Source = COMPLETION,
    ) -> PromptText:
        """A text's tokens; `keep` cuts it to its last tokens, -1 to what fits."""
        self._check_characters(text, 0 if keep is None else _MOST_CHARACTERS, source)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._fitting(ids, text, keep, source)

    def of_tokens(
        self, ids: list[int], *, keep: int | None = None, source: Source = COMPLETION
    ) -> PromptText:
        """Tokens as they are."""
        return self._fitting(ids, None, keep, source)

    def of_messages(
        self,
        messages: Sequence[Message],
        rendering: Rendering,
        *,
        truncation: str = "disabled",
        retention: float = 1.0,
        reserve: int = 1,
        keep: int | None = None,
        source: Source = CHAT,
    ) -> PromptText:
        """A conversation through the chat template.

        truncation "auto" leaves out the oldest turns, but never the system's and the last, until
        the prompt and `reserve` tokens fit; each prompt then begins with a user's turn. retention
        below 1: until about so much of the room is left, for the next requests to begin alike.
        """
        if truncation == "disabled":
            source = replace(source, advice=source.advice + source.leaving_out)
        if truncation == "disabled" and keep is None and len(messages) > self._max_len:
            raise ApiError(
                400,
                f"{self._context(source, len(messages), self._max_len, 'messages')} The "
                f"conversation has {len(messages):,} messages. {source.shorten}{source.advice}.",
                param=source.field,
                code="context_length_exceeded",
            )
        if keep is None:
            self.check_tools(rendering.telling, source)
        plain = self.plain(messages, rendering, source)
        share = retention if truncation == "auto" else None
        text, ids, left_out = self._shortened(plain, rendering, source, share, reserve)
        if keep is None:
            self._check_room(ids, rendering.telling, source)
        shown = [m for i, m in enumerate(plain) if i not in left_out]
        seen: tuple[Picture, ...] = pictures_of(shown)
        if seen:
            source = replace(source, advice=", or send fewer or smaller pictures")
        made = self._fitting(ids, text, keep, source)
        if seen and made.tokens is not ids:
            raise ApiError(
                400,
                f"truncate_prompt_tokens cuts the start of a prompt of {len(ids):,} tokens, and "
                "its pictures with it. Leave it out, and send fewer pictures or less text.",
                param="truncate_prompt_tokens",
                code="context_length_exceeded",
            )
        kept = [m for i, m in enumerate(messages) if i not in left_out]
        passages = [passage for message in kept for passage in message.passages()]
        marks = [i for i, (_, mark) in enumerate(passages) if mark is not None]
        if len(marks) > _MOST_MARKS:
            raise ApiError(
                400,
                f"cache_control is set {len(marks)} times; at most {_MOST_MARKS} are kept apart.",
                param="cache_control",
            )
        if marks and made.tokens is not ids:
            raise ApiError(
                400,
                "truncate_prompt_tokens cuts the start of the prompt, which cache_control would "
                "keep. Leave out one of them.",
                param="cache_control",
            )
        pins = self._pins(passages, text, ids, rendering)
        if len(pins) < len(marks):  # perhaps what the system says stands before all others
            first = sorted(kept, key=lambda message: message.role not in ("system", "developer"))
            passages = [passage for message in first for passage in message.passages()]
            pins = max(pins, self._pins(passages, text, ids, rendering), key=len)
        missed = len(marks) - len(pins)
        return PromptText(made.tokens, text, len(left_out), pins, seen, unpinned=missed)

    def _shortened(
        self,
        plain: list[dict[str, Any]],
        rendering: Rendering,
        source: Source,
        retention: float | None,
        reserve: int,
    ) -> tuple[str, list[int], range]:
        """(text, tokens, messages left out): the most of the newest turns that fit, or fewer.

        retention: None where nothing is left out.
        """
        starts = starts_of(plain) if retention is not None else []
        head = plain[: starts[0]] if starts else []  # the system's
        # Each message is a token at least: those before the last max_len can't fit.
        low = next((i for i, x in enumerate(starts) if len(plain) - x <= self._max_len), 0)
        if retention is not None and retention < 1:
            playing = Retention(
                lambda text: self.tokenizer.encode(text, add_special_tokens=False),
                lambda messages: self.render(messages, rendering, source),
                self._max_len,
                reserve,
            )
            whole = playing.whole(plain)
            if whole is not None:
                return *whole, range(0)
            low = max(low, playing.first_kept(plain, starts, retention))
        high = max(low, len(starts) - 1)
        while True:  # low: the first that isn't known to be too long; high: tried when none fits
            middle = low if low == high else (low + high) // 2
            start = starts[middle] if starts else 0
            kept = head + plain[start:] if starts else plain
            text, ids = self.render(kept, rendering, source)
            fits = len(ids) + reserve <= self._max_len
            if low == high:
                return text, ids, range(len(head), start)
            low, high = (low, middle) if fits else (middle + 1, high)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text's tokens, whether or not the model can take as many."""
        self._check_characters(text, _MOST_CHARACTERS, Source("prompt"))
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def rendered(self, messages: Sequence[Message], rendering: Rendering) -> list[int]:
        """A conversation's tokens, whether or not the model can take as many."""
        plain = self.plain(messages, rendering, CONVERSATION)
        return self.render(plain, rendering, CONVERSATION)[1]

    def plain(
        self, messages: Sequence[Message], how: Rendering, source: Source
    ) -> list[dict[str, Any]]:
        """The messages as the template reads them."""
        for message in messages:
            if message.content is None and not message.tool_calls:
                said = f"A message of the {message.role} has no content."
                raise ApiError(400, said, param=source.field)
        if how.continue_final_message and messages[-1].tool_calls:
            raise ApiError(
                400,
                "continue_final_message goes on with the last message's text, behind which its "
                "tool_calls would be lost. Leave out one of them.",
                param="continue_final_message",
            )
        self._check_variables(how, source)
        form = ToolCallForm()
        if any(message.tool_calls for message in messages):
            try:
                form = self.tokenizer.tool_call_form(
                    how.chat_template, has_tools=bool(how.telling.tools)
                )
            except ChatTemplateError as error:
                raise _template_error(error, source) from error
        plain = self._seen([message.for_template(form) for message in messages], source)
        history = how.telling.history
        return plain if history is None else [without_calls(x, history) for x in plain]

    def _seen(self, plain: list[dict[str, Any]], source: Source) -> list[dict[str, Any]]:
        """Messages whose pictures are cut as the model takes them. Raises ApiError."""
        given = pictures_of(plain)
        if not given:
            return plain
        if self._pictures is None:
            raise ApiError(400, NO_SIGHT, param=source.field)
        try:
            cut = [self._pictures.cutter.cut(image) for image in open_pictures_of(given)]
        except InvalidPromptError as error:
            raise ApiError(400, str(error), param=source.field, code="invalid_image") from error
        left = iter(cut)
        return [
            {**message, "content": [_as_cut(part, left) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in plain
        ]

    def _check_variables(self, how: Rendering, source: Source) -> None:
        """Raises ApiError for what the request gives to the template and that doesn't read it."""
        given = {name for name, value in (how.kwargs or {}).items() if value is not None}
        taken = sorted(_TEMPLATE_ARGUMENTS & given)
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs can't set {taken[0]!r}, which the request itself says.",
                param="chat_template_kwargs",
            )
        given -= _HARMLESS_VARIABLES
        if not given and not how.documents:
            return
        try:
            read = self.tokenizer.template_variables(how.chat_template)
        except ChatTemplateError as error:
            raise _template_error(error, source) from error
        unread = sorted(given - read)
        if unread:
            raise ApiError(
                400,
                f"chat_template_kwargs sets {unread[0]!r}, which this chat template doesn't read. "
                "Leave it out.",
                param="chat_template_kwargs",
            )
        if how.documents and "documents" not in read:
            raise ApiError(
                400,
                "This chat template reads no documents. Write them into a message.",
                param="documents",
            )

    def render(
        self, plain: list[dict[str, Any]], how: Rendering, source: Source
    ) -> tuple[str, list[int]]:
        """The text and tokens of messages as `plain` has them. Raises ApiError."""
        tokenizer = self.tokenizer
        try:
            text = self._written(plain, how)
        except ChatTemplateError as error:
            together = _system_first(plain)
            if together is None:
                raise _template_error(error, source) from error
            try:
                text = self._written(together, how)
            except ChatTemplateError:
                raise _template_error(error, source) from error
        pictures = pictures_of(plain)
        if pictures and self._pictures is not None:
            try:
                text = self._pictures.expand(text, pictures)
            except InvalidPromptError as error:
                raise ApiError(400, str(error), param=source.field) from error
        self._check_characters(text, _MOST_CHARACTERS, source)
        return text, tokenizer.encode(text, add_special_tokens=how.add_special_tokens)

    def _written(self, plain: list[dict[str, Any]], how: Rendering) -> str:
        """Messages through the template. Raises ChatTemplateError."""
        return self.tokenizer.apply_chat_template(
            how.telling.told(plain),
            tools=how.telling.tools or None,
            documents=how.documents,
            add_generation_prompt=how.add_generation_prompt and not how.continue_final_message,
            continue_final_message=how.continue_final_message,
            chat_template=how.chat_template,
            **(how.kwargs or {}),
        )

    def _pins(
        self,
        passages: Sequence[tuple[str, CacheControl | None]],
        text: str,
        ids: list[int],
        how: Rendering,
    ) -> tuple[Pin, ...]:
        """How many of the prompt's first tokens the passages up to each mark decide, as far as the
        template writes them one after the other.
        """
        marks = [i for i, (_, mark) in enumerate(passages) if mark is not None]
        at, pins = 0, []
        for passage, mark in passages[: marks[-1] + 1] if marks else []:
            content = passage.strip()
            found = text.find(content, at)
            if found < 0:
                break
            at = found + len(content)
            if mark is not None:
                pins.append(Pin(self._decided(text[:at], ids, how), mark.seconds))
        return tuple(pins)

    def _decided(self, text: str, ids: list[int], how: Rendering) -> int:
        """How many of `ids` stay the same whatever follows `text`, with which they begin."""
        before = self.tokenizer.encode(text, add_special_tokens=how.add_special_tokens)
        same = 0
        for one, other in zip(before, ids, strict=False):
            if one != other:
                break
            same += 1
        return same

    def _check_characters(self, text: str, least: int, source: Source) -> None:
        """Refuse what can't fit without spending the time to split it into tokens.

        least: so many characters are read in any case.
        """
        most = max(self._max_len * CHARACTERS_PER_TOKEN, least)
        if len(text) > most:
            raise ApiError(
                400,
                f"{self._context(source, len(text), most, 'characters')} The prompt has "
                f"{len(text):,} characters, and at most {most:,} are read. {source.shorten}.",
                param=source.field,
                code="context_length_exceeded",
            )

    def check_tools(self, telling: Telling, source: Source = CHAT) -> None:
        """Refuse tools that can't fit before they are written into a prompt."""
        most = self._max_len * CHARACTERS_PER_TOKEN
        if telling.size > most:
            raise ApiError(
                400,
                f"{self._context(source, telling.size, most, 'characters')} The tools have "
                f"{telling.size:,} characters as JSON, and at most {most:,} characters are read. "
                f"{_TOOLS}",
                param="tools",
                code="context_length_exceeded",
            )

    def _context(
        self, source: Source = CHAT, given: int = 0, most: int = 0, unit: str = "tokens"
    ) -> str:
        """By these words clients know that a prompt is too long: OpenAI's and vLLM's, and on its
        own endpoints Anthropic's.
        """
        if source.says_too_long and given:
            return f"prompt is too long: {given} {unit} > {most} maximum."
        return f"This model's maximum context length is {self._max_len} tokens."

    def _check_room(self, ids: list[int], telling: Telling, source: Source) -> None:
        """Raises ApiError for a prompt that would fit if it weren't for its tools."""
        most = self._max_len - source.generates
        if not telling.size or len(ids) <= most:
            return
        told = self.tokenizer.encode(telling.shown, add_special_tokens=False)
        count = min(len(told), len(ids))  # a template may write less of them
        if len(ids) - count <= most:
            raise ApiError(
                400,
                f"{self._context(source, len(ids), most)} The prompt has {len(ids):,} tokens, of "
                f"which the tools are about {count:,}; only {most:,} fit with at least one to "
                f"generate. {_TOOLS}",
                param="tools",
                code="context_length_exceeded",
            )

    def _fitting(
        self, ids: list[int], text: str | None, keep: int | None, source: Source
    ) -> PromptText:
        """The prompt, cut to its end where `keep` says so. Raises ApiError for one too long."""
        most = self._max_len - source.generates
        if keep is not None:
            count = most if keep == -1 else keep
            if count < len(ids):
                ids, text = ids[len(ids) - count :], None
        if len(ids) > most:
            generating = "with at least one to generate " if source.generates else ""
            raise ApiError(
                400,
                f"{self._context(source, len(ids), most)} The prompt has {len(ids):,} tokens, but "
                f"{generating}only {most:,} fit. {source.shorten}{source.advice}.",
                param=source.field,
                code="context_length_exceeded",
            )
        return PromptText(ids, text)

    def limit(self, prompt: PromptText, asked: int | None, field: str) -> int:
        """Tokens that may be generated. Raises ApiError when more are asked for than fit."""
        room = self._max_len - len(prompt.tokens)
        if asked is None:
            return room
        if asked > room:
            raise ApiError(
                400,
                f"{self._context()} {field} is {asked:,}, but after a prompt of "
                f"{len(prompt.tokens):,} tokens only {room:,} fit.",
                param=field,
                code="context_length_exceeded",
            )
        return asked


def _as_cut(part: dict[str, Any], left: Iterator[Picture]) -> dict[str, Any]:
    """A part, with the next of the cut pictures where it is one."""
    return {**part, "picture": next(left)} if part["type"] == "image" else part


def pictures_of(plain: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Those of messages, in their order."""
    contents = (m["content"] for m in plain)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(part["picture"] for part in parts if part["type"] == "image")


def _system_first(plain: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The same with all that the system says in one message, and that first, as many templates want
    it; None: it is so already.
    """
    said = [message for message in plain if message["role"] == "system"]
    if not said or (len(said) == 1 and said[0] is plain[0]):
        return None
    text = "\n\n".join(message["content"] or "" for message in said)
    others = [message for message in plain if message["role"] != "system"]
    return [{"role": "system", "content": text}, *others]


def _template_error(error: ChatTemplateError, source: Source) -> ApiError:
    return ApiError(400, str(error), param=source.field, code="chat_template_error")

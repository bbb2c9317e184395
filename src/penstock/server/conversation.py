"""From messages to the tokens of a prompt, and what becomes of one that is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine import Pin
from penstock.errors import ChatTemplateError, TokenizerError
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import Message
from penstock.server.protocol.common import CacheControl
from penstock.tokenizer import Tokenizer

# A token of more characters than this is possible; a prompt made of nothing else is not a text.
_CHARACTERS_PER_TOKEN = 128
# What is read of texts that may be longer than the model takes; a million characters take a second.
_MOST_CHARACTERS = 1 << 20
_MOST_MARKS = 4  # of cache_control, as in Anthropic's API
# What a template is given beside a request's own variables.
_TEMPLATE_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message documents messages self "
    "tools".split()
)


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt that is ready for the engine."""

    tokens: list[int]
    text: str | None = None
    dropped: int = 0  # messages that were left out to make it fit
    pins: tuple[Pin, ...] = ()  # of its start, to be kept in the cache


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is written."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class Prompts:
    """Makes prompts; its methods take long for long texts, and may run in any thread."""

    def __init__(self, tokenizer: Tokenizer | None, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError where there is none."""
        if self._tokenizer is None:
            raise ApiError(
                400,
                "This server runs without a tokenizer (skip_tokenizer_init). Send token ids.",
                param="prompt",
            )
        return self._tokenizer

    def of_text(
        self, text: str, *, add_special_tokens: bool = True, keep: int | None = None
    ) -> PromptText:
        """A text's tokens; `keep` cuts it to its last tokens, -1 to what fits."""
        self._check_characters(text, 0 if keep is None else _MOST_CHARACTERS)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._fitting(ids, text, keep)

    def of_tokens(self, ids: list[int], *, keep: int | None = None) -> PromptText:
        """Tokens as they are."""
        return self._fitting(ids, None, keep)

    def of_messages(
        self,
        messages: Sequence[Message],
        rendering: Rendering,
        *,
        truncation: str = "disabled",
        reserve: int = 1,
        keep: int | None = None,
    ) -> PromptText:
        """A conversation through the chat template.

        truncation "auto" leaves out the oldest turns, but never the system's and the last, until
        the prompt and `reserve` tokens fit; each prompt then begins with a user's turn.
        """
        if truncation == "disabled" and keep is None and len(messages) > self._max_len:
            raise ApiError(
                400,
                f"The conversation has {len(messages):,} messages; the model takes "
                f"{self._max_len:,} tokens. Shorten it.",
                param="messages",
                code="context_length_exceeded",
            )
        plain = [message.for_template() for message in messages]
        text, ids, left_out = self._shortened(plain, rendering, truncation == "auto", reserve)
        made = self._fitting(ids, text, keep)
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
        pins = self._pins(passages[: marks[-1] + 1] if marks else [], text, ids, rendering)
        return PromptText(made.tokens, text, len(left_out), pins)

    def _shortened(
        self, plain: list[dict[str, Any]], rendering: Rendering, shorten: bool, reserve: int
    ) -> tuple[str, list[int], range]:
        """(text, tokens, messages left out): the most of the newest turns that fit."""
        starts = _starts(plain) if shorten else []
        head = plain[: starts[0]] if starts else []  # the system's
        # Each message is a token at least: those before the last max_len can't fit.
        low = next((i for i, x in enumerate(starts) if len(plain) - x <= self._max_len), 0)
        high = max(low, len(starts) - 1)
        while True:  # low: the first that isn't known to be too long; high: tried when none fits
            middle = low if low == high else (low + high) // 2
            start = starts[middle] if starts else 0
            text, ids = self._render(head + plain[start:] if starts else plain, rendering)
            fits = len(ids) + reserve <= self._max_len
            if low == high:
                return text, ids, range(len(head), start)
            low, high = (low, middle) if fits else (middle + 1, high)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text's tokens, whether or not the model can take as many."""
        self._check_characters(text, _MOST_CHARACTERS)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def rendered(self, messages: Sequence[Message], rendering: Rendering) -> list[int]:
        """A conversation's tokens, whether or not the model can take as many."""
        return self._render([message.for_template() for message in messages], rendering)[1]

    def _render(self, plain: list[dict[str, Any]], how: Rendering) -> tuple[str, list[int]]:
        tokenizer = self.tokenizer
        taken = sorted(_TEMPLATE_ARGUMENTS & (how.kwargs or {}).keys())
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs can't set {taken[0]!r}, which the request itself says.",
                param="chat_template_kwargs",
            )
        try:
            text = tokenizer.apply_chat_template(
                plain,
                documents=how.documents,
                add_generation_prompt=how.add_generation_prompt and not how.continue_final_message,
                continue_final_message=how.continue_final_message,
                chat_template=how.chat_template,
                **(how.kwargs or {}),
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template_error") from error
        self._check_characters(text, _MOST_CHARACTERS)
        return text, tokenizer.encode(text, add_special_tokens=how.add_special_tokens)

    def _pins(
        self,
        passages: Sequence[tuple[str, CacheControl | None]],
        text: str,
        ids: list[int],
        how: Rendering,
    ) -> tuple[Pin, ...]:
        """How many of the prompt's first tokens the passages up to each mark decide."""
        at, pins = 0, []
        for passage, mark in passages:
            content = passage.strip()
            found = text.find(content, at)
            if found < 0:
                raise ApiError(
                    400,
                    "The chat template rewrites the messages, so where the part to cache ends "
                    "can't be found.",
                    param="cache_control",
                )
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

    def _check_characters(self, text: str, least: int) -> None:
        """Refuse what can't fit without spending the time to split it into tokens.

        least: so many characters are read in any case.
        """
        most = max(self._max_len * _CHARACTERS_PER_TOKEN, least)
        if len(text) > most:
            raise ApiError(
                400,
                f"The prompt has {len(text):,} characters; the model takes {self._max_len:,} "
                f"tokens, and at most {most:,} characters are read. Shorten it.",
                param="prompt",
                code="context_length_exceeded",
            )

    def _fitting(self, ids: list[int], text: str | None, keep: int | None) -> PromptText:
        """The prompt, cut to its end where `keep` says so. Raises ApiError for one too long."""
        if keep is not None:
            count = self._max_len - 1 if keep == -1 else keep
            if count < len(ids):
                ids, text = ids[len(ids) - count :], None
        if len(ids) >= self._max_len:
            raise ApiError(
                400,
                f"The prompt has {len(ids):,} tokens, but with at least one to generate only "
                f"{self._max_len - 1:,} fit into this model's {self._max_len:,}. Shorten it, or "
                "send truncate_prompt_tokens: -1 to keep its end"
                ' (conversations: truncation: "auto" leaves out old turns).',
                param="prompt",
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
                f"{field} is {asked:,}, but after a prompt of {len(prompt.tokens):,} tokens only "
                f"{room:,} fit into this model's {self._max_len:,}.",
                param=field,
                code="context_length_exceeded",
            )
        return asked


def _starts(plain: list[dict[str, Any]]) -> list[int]:
    """Where a conversation may begin after the system's messages: there, or at a user's turn."""
    head = 0
    while head < len(plain) and plain[head]["role"] == "system":
        head += 1
    return [head, *(i for i in range(head + 1, len(plain)) if plain[i]["role"] == "user")]


def token_strings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The pieces as the vocabulary writes them. Raises TokenizerError for an unknown id."""
    pieces = []
    for token in ids:
        piece = tokenizer.id_to_token(token)
        if piece is None:
            raise TokenizerError(
                f"Token id {token} isn't in the vocabulary of {tokenizer.vocab_size}."
            )
        pieces.append(piece)
    return pieces

"""`/v1/responses`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.sampling import StructuredOutputs
from penstock.server.answers import unheeded
from penstock.server.compaction import Conversation
from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.chat import Message
from penstock.server.protocol.common import (
    MOST_MESSAGES,
    Body,
    ContextManagements,
    Effort,
    EngineFields,
    SamplingFields,
    Some,
    UserName,
)
from penstock.server.protocol.compaction import unsealed
from penstock.server.protocol.earlier import MOST_ID_CHARACTERS, NOTHING, Earlier, not_kept
from penstock.server.protocol.items import InputItem, turns_of
from penstock.server.protocol.response_tools import ResponseChoice, ResponseTools, functions_of
from penstock.server.protocol.structure import TextFormat
from penstock.server.tools.offer import Choice, Offer, offer_of

MOST_METADATA = 16  # as in the API


def _few(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > MOST_METADATA:
        raise ValueError(f"has {len(data):,} entries; at most {MOST_METADATA} are kept")
    return data


LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for …
ENCRYPTED = "reasoning.encrypted_content"  # … and what clients always do: reasoning comes as text


class TextOptions(Body):
    """`text`: how the answer is written."""

    format: TextFormat | None = None
    hints: ClassVar[Mapping[str, str]] = {"verbosity": "text.verbosity"}


class ReasoningOptions(Body):
    """`reasoning`: how much of it. It is shown itself, not summed up."""

    effort: Effort | None = None
    hints: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning.summary",
        "generate_summary": "reasoning.generate_summary",
    }


class Inputs(Body):
    """What an answer, or a compaction, is made from."""

    input: str | Annotated[Some[InputItem], Field(max_length=MOST_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MOST_ID_CHARACTERS)] | None = None

    def items(self, earlier: Earlier) -> list[InputItem]:
        """The input as items, what they refer to among them. Raises ApiError."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        if self.input is None and not self.previous_response_id:
            raise ApiError(
                400, "'input' is missing.", param="input", code="missing_required_parameter"
            )
        return earlier.resolved(self.input or ())

    def conversation(self, earlier: Earlier = NOTHING) -> Conversation:
        """The instructions, then what it goes on from and the input: from the last compaction on,
        which stands for all before it but the system's messages. Raises ApiError for what can't be
        a conversation.
        """
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        before = earlier.items()
        items = [*before, *self.items(earlier)]
        at = next((i for i in reversed(range(len(items))) if items[i].type == "compaction"), None)
        if at is None:
            turns = [*first, *turns_of(items)]
            if not (items and turns):
                raise ApiError(400, "The input is empty.", param="input")
            return Conversation(turns)
        own = at - len(before)
        place = f"input[{own}].encrypted_content" if own >= 0 else "previous_response_id"
        opened = unsealed(items[at].encrypted_content or "", place)
        said = [x.message() for x in items[:at] if x.role in ("system", "developer")]
        head = [*first, *(said or opened.system)]
        return Conversation([*head, *opened.others, *turns_of(items[at + 1 :])], opened.summary)

    def sealable(self, conversation: Conversation) -> Conversation:
        """What of a conversation an item has to keep: instructions come with each request."""
        if not self.instructions:
            return conversation
        return Conversation(conversation.messages[1:], conversation.summary)


class Asking(Inputs):
    """What decides on an answer's prompt."""

    model: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseChoice = None
    parallel_tool_calls: bool | None = None

    def offer(self) -> Offer:
        """The tools that may be called. Raises ApiError."""
        choice = self.tool_choice
        chosen = Choice(choice) if choice is None or isinstance(choice, str) else choice.choice()
        functions = functions_of(self.tools or ())
        return offer_of(functions, chosen, self.parallel_tool_calls is not False)


class InputTokensRequest(Asking):
    """`POST /v1/responses/input_tokens`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conversation": ()}
    hints: ClassVar[Mapping[str, str]] = {"personality": "personality"}


class ResponsesRequest(SamplingFields, EngineFields, Asking):
    """`POST /v1/responses`."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    context_management: ContextManagements | None = None
    user: UserName | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    safety_identifier: UserName | None = None
    store: bool | None = None  # where the server keeps responses it does unless this is false
    client_metadata: dict[str, Any] | None = None  # labels, as Codex sends them
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (),
        "background_options": (),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_logprobs": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False},),
    }

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities beside each token's own; None for none at all."""
        included = self.include or ()
        other = next((x for x in included if x not in (LOGPROBS, ENCRYPTED)), None)
        if other is not None:
            raise unsupported("include", kind=f"What {other[:60]!r} asks for")
        if ENCRYPTED in included:
            unheeded(f"include ({ENCRYPTED})")
        return 0 if LOGPROBS in included and self.top_logprobs is None else self.top_logprobs

    def structure(self) -> tuple[StructuredOutputs | None, str]:
        """The form that the answer must have, and the field that says so. Raises ApiError."""
        asked = None if self.text is None else self.text.format
        return None if asked is None else asked.structure("text.format"), "text.format"

    def conversation(self, earlier: Earlier = NOTHING) -> Conversation:
        """As of any input. Raises ApiError."""
        if self.store and earlier.stored is None:
            raise not_kept("store")
        return super().conversation(earlier)


class CompactRequest(EngineFields, Inputs):
    """`POST /v1/responses/compact`."""

    model: str | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    chat_template_kwargs: dict[str, Any] | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image": (),
        "kv_transfer_params": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
    }

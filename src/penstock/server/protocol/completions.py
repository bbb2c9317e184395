"""`/v1/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from penstock.server.protocol.beams import BeamFields
from penstock.server.protocol.common import (
    EngineFields,
    Some,
    StreamOptions,
    TokenId,
    UserName,
)
from penstock.server.protocol.structure import StructureFields


def _kind(prompt: Any) -> str | None:
    """What a prompt is by its first element, so that only one kind is tried."""
    if isinstance(prompt, list):
        first = prompt[0] if prompt else ""
        kinds = {str: "list[str]", int: "list[int]", list: "list[list[int]]"}
        return kinds.get(type(first))
    return "str" if isinstance(prompt, str) else None


PromptField = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Some[str], Tag("list[str]")]
    | Annotated[Some[TokenId], Tag("list[int]")]
    | Annotated[Some[Some[TokenId]], Tag("list[list[int]]")],
    Discriminator(
        _kind,
        custom_error_type="prompt_type",
        custom_error_message="Give a text, token ids, or a list of texts or of lists of token ids",
    ),
]
DEFAULT_MAX_TOKENS = 16  # as in the API


def _count(data: Any) -> Any:
    """A chat's true and false, which clients send here too, as numbers: so vLLM reads true."""
    return (1 if data else None) if isinstance(data, bool) else data


class CompletionRequest(BeamFields, StructureFields, EngineFields):
    """`POST /v1/completions`."""

    model: str | None = None
    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(_count)] = None
    echo: bool | None = None
    token_healing: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: UserName | None = None
    request_id: str | None = None
    hints: ClassVar[Mapping[str, str]] = {"session_id": ""}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logits_processors": (),
        "prompt_embeds": (),
        "spaces_between_special_tokens": (True,),
        "suffix": (),
        "vllm_xargs": (),
    }

    @property
    def limit(self) -> int:
        """Most tokens to generate."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def ranks(self) -> bool:
        """Whether the samples that come back are chosen from more, or put in order."""
        return self.best_of is not None and self.best_of > 1

    @property
    def samples(self) -> int:
        """Sequences to generate for each prompt."""
        return max(self.n or 1, self.best_of or 1)

"""`/tokenize` and `/detokenize`: the requests, as in vLLM."""

from __future__ import annotations

from pydantic import Field

from penstock.server.protocol.chat import Message, TemplateFields
from penstock.server.protocol.common import MOST_MESSAGES, Body, Some, TokenId


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] = Field(default_factory=list, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Some[TokenId]


class TokenizeResponse(Body):
    """The ids, and how many the model can take."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Body):
    """The text."""

    prompt: str

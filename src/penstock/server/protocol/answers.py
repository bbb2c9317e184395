"""Answers as the OpenAPI document describes them; nothing is checked against these at run time."""

from __future__ import annotations

from typing import Any, Literal

from penstock.server.protocol.common import Body

FinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call"]


class Summarised(Body):
    """Of how many messages a summary is, and what of the usage was for writing it."""

    messages: int
    passes: int  # 0: it was remembered
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Measured(Body):
    """What Penstock adds: how long it took, and how near the hardware's floor."""

    queue_s: float | None
    ttft_s: float | None
    tokens_per_s: float | None
    floor_s: float | None
    floor_ratio: float | None
    bound: str | None
    draft_tokens: int  # guessed ahead and verified
    accepted_tokens: int  # … and right
    compaction: Summarised | None = None


class PromptTokensDetails(Body):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Body):
    """Where a prediction was given: of the tokens guessed by it, those that came and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Body):
    """Tokens of the completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(Body):
    """A token, how likely it was, and its bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprob(TokenLogprob):
    """… and the most likely ones at its place."""

    top_logprobs: list[TokenLogprob]


class PromptLogprob(Body):
    """vLLM's, of a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatLogprobs(Body):
    """Of a chat's answer."""

    content: list[PositionLogprob]
    refusal: None


class CalledFunction(Body):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class MadeCall(Body):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """What was answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MadeCall] | None = None
    function_call: CalledFunction | None = None


class ChatChoice(Body):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Body):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    penstock: Measured
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Body):
    """Of a text, in the form of the older API."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Body):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Body):
    """The answer of `/v1/completions`; `penstock` is of one prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    penstock: Measured | None = None


class OutputText(Body):
    """What a message says."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[PositionLogprob]


class OutputMessage(Body):
    """A message of a response."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoningText(Body):
    """What was thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Body):
    """Reasoning of a response."""

    type: Literal["reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputCall(Body):
    """A call of a function; arguments are a JSON object as text."""

    type: Literal["function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCompaction(Body):
    """What stands for a conversation's older turns, to be sent back as it is."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str


class InputText(Body):
    """What a user said."""

    type: Literal["input_text"]
    text: str


class KeptMessage(Body):
    """A user's message that a compaction has kept."""

    type: Literal["message"]
    id: str
    status: Literal["completed"]
    role: Literal["user"]
    content: list[InputText]


class InputTokensDetails(Body):
    """Of the input's tokens."""

    cached_tokens: int


class OutputTokensDetails(Body):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Body):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OfCompaction(Body):
    """What Penstock adds to a compaction."""

    compaction: Summarised


class CompactedResponse(Body):
    """The answer of `/v1/responses/compact`."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[KeptMessage | OutputCompaction]
    usage: ResponseUsage
    penstock: OfCompaction


class IncompleteDetails(Body):
    """Why a response isn't whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(Body):
    """Why a response failed."""

    code: str
    message: str


class Response(Body):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall | OutputCompaction]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | None
    user: str | None
    penstock: Measured | None = None


class DeletedResponse(Body):
    """The answer of a DELETE of one."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Body):
    """The answer of `/v1/responses/{response_id}/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Embedding(Body):
    """One prompt's vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Body):
    """Tokens of the prompts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Body):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class TextBlock(Body):
    """What a message says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What was thought before it; nothing signs it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Body):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class CompactionBlock(Body):
    """A summary of older turns, to be sent back as it is."""

    type: Literal["compaction"]
    content: str
    encrypted_content: str


class _Tokens(Body):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class IterationUsage(_Tokens):
    """What of the tokens a summary has taken, and what the message."""

    type: Literal["compaction", "message"]


class MessageUsage(_Tokens):
    """Tokens of a message: computed, kept, found in the cache, generated."""

    iterations: list[IterationUsage] | None = None  # where a summary was written


class MessageAnswer(Body):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[CompactionBlock | ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "compaction"]
    stop_sequence: str | None
    usage: MessageUsage
    penstock: Measured | OfCompaction

"""What a caller gets back, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from penstock.sampling import TokenLogprobs


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of the monotonic clock, and what was saved or lost."""

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)  # of the first sample's tokens
    finished_time: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix tree
    preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """From arrival until first scheduled."""
        start = self.first_scheduled_time
        return None if start is None else start - self.arrival_time

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def itl_s(self) -> list[float]:
        """Between one token and the next."""
        return [b - a for a, b in pairwise(self.token_times)]

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the end."""
        end = self.finished_time
        return None if end is None else end - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the token id or the string that stopped it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's samples so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None  # why finish_reason is "error"

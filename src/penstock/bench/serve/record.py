"""What one request went through, on the run's own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds since the run began; None is what hasn't happened."""

    index: int  # of its conversation in the workload
    turn: int  # in the conversation, from 0
    prompt_len: int  # tokens that the workload gives it
    output_len: int  # tokens that it asks for
    intended_s: float  # when it was to be sent: latencies count from here
    ready_s: float | None = None  # when the client turned to it
    slot_s: float | None = None  # when --max-concurrency let it go
    sent_s: float | None = None  # when it was handed to a connection
    token_times_s: list[float] = field(default_factory=list)  # when chunks with tokens came
    last_s: float | None = None  # when the last chunk of the answer came
    end_s: float | None = None  # when the exchange was over, or failed
    prompt_tokens: int | None = None  # these three as the server counts
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # its kind
    message: str | None = None
    rejections: int = 0  # answers with status 429

    @property
    def done(self) -> bool:
        """Answered in full."""
        return self.end_s is not None and self.error is None

    @property
    def failed(self) -> bool:
        """Ended by an error."""
        return self.error is not None

    @property
    def input_tokens(self) -> int:
        """As the server counts, or else as the workload has it."""
        return self.prompt_len if self.prompt_tokens is None else self.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """As the server counts, or else the chunks."""
        known = self.completion_tokens
        return len(self.token_times_s) if known is None else known

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times_s[0] - self.intended_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """To the answer's last chunk."""
        return None if self.last_s is None else self.last_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        tokens = self.output_tokens
        if tokens < 2 or self.last_s is None or not self.token_times_s:
            return None
        return (self.last_s - self.token_times_s[0]) / (tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks."""
        return [b - a for a, b in pairwise(self.token_times_s)]

    @property
    def lag_s(self) -> float | None:
        """How late the client itself was: to turn to it, and from its slot to the sending."""
        if self.ready_s is None or self.slot_s is None or self.sent_s is None:
            return None
        return self.ready_s - self.intended_s + self.sent_s - self.slot_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
        }

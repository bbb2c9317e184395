"""What a caller gets back, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from penstock.roofline import CAUSES, Bound, StepRecord
from penstock.sampling import TokenLogprobs
from penstock.speculate import DraftCounts


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of the monotonic clock, and what was saved or lost.

    Floors are known once this machine's peaks are (`penstock doctor --calibrate`).
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)  # of the first sample's tokens
    finished_time: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix tree
    computed_tokens: int = 0  # of the prompt; those that gave way count again
    preemptions: int = 0
    steps_s: float = 0.0  # of the steps it took part in, alone or with others
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Seconds of these steps, and before them, outside the forward pass: by cause."""
    memory_s: float = 0.0  # the least time that these steps' bytes take
    compute_s: float = 0.0  # … and their FLOPs
    floor_s: float | None = None  # the least time that these steps could have taken
    known_s: float = 0.0  # of `steps_s`: the steps whose floor is known
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of all its samples
    predicted: DraftCounts = field(default_factory=DraftCounts)  # of these, by its `prediction`

    def take_part(self, record: StepRecord) -> None:
        """Count a step that this request was in."""
        self.steps_s += record.seconds
        for cause, seconds in record.lost.items():
            self.lost_s[cause] += seconds
        floor = record.floor
        if floor is not None:
            self.memory_s += floor.memory_s
            self.compute_s += floor.compute_s
            self.floor_s = (self.floor_s or 0.0) + floor.seconds
            self.known_s += record.seconds

    @property
    def achieved(self) -> float | None:
        """Floor ÷ time of the steps whose floor is known; above 1 only where the weights stay in a
        cache.
        """
        return None if self.floor_s is None else self.floor_s / self.known_s

    @property
    def bound(self) -> Bound | None:
        """What its floor is made of."""
        if self.floor_s is None:
            return None
        return "memory" if self.memory_s >= self.compute_s else "compute"

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
        """Between one token and the next; 0 where one step gave both."""
        return [b - a for a, b in pairwise(self.token_times)]

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the end."""
        end = self.finished_time
        return None if end is None else end - self.arrival_time


@dataclass(slots=True)
class PreemptionRecord:
    """One time that a request gave way: what that was expected to cost, and what it did.

    recompute: the forward pass of the tokens that were computed again, which is their share, by
    number, of the steps they were in. swap: the time of the copies out and back.
    """

    request_id: str
    mode: Literal["recompute", "swap"]
    tokens: int  # whose keys and values it gave up; what samples share counts for each
    blocks: int  # that held them
    predicted_s: float | None  # None: before anything was measured
    measured_s: float = 0.0
    redo_tokens: int = 0  # that have still to be computed again


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
    score: float | None = None  # of beam search: what it is ranked by

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One of a search's hypotheses."""

    tokens: list[int]  # the prompt's and its own
    text: str  # of both
    output_text: str  # of its own
    score: float  # what it is ranked by: cum_logprob ÷ its tokens ** length_penalty
    cum_logprob: float
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class BeamSearchOutput:
    """What a prompt's beam search has found, the best first."""

    sequences: list[BeamSearchSequence]
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics

    @classmethod
    def of(cls, output: RequestOutput, prompt: str) -> BeamSearchOutput:
        """From what the engine gives; prompt: its text."""
        found = [
            BeamSearchSequence(
                tokens=output.prompt_token_ids + one.token_ids,
                text=prompt + one.text,
                output_text=one.text,
                score=one.score or 0.0,
                cum_logprob=one.cumulative_logprob or 0.0,
                logprobs=one.logprobs,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for one in output.outputs
        ]
        return cls(found, output.prompt, output.prompt_token_ids, output.metrics)


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
    num_taken_back: int = 0  # of the prompt's tokens: the last, in whose place output tokens stand

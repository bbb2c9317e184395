"""A request, and the sequences that answer it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.cache import Node
from penstock.engine.options import RequestOptions
from penstock.engine.outputs import (
    CompletionOutput,
    PreemptionRecord,
    RequestMetrics,
    RequestOutput,
)
from penstock.engine.pictures import Seen
from penstock.runtime.adapters import Adapter
from penstock.sampling import SamplingParams, SequenceSampling, TokenLogprobs
from penstock.speculate import Draft, Expected, Prediction
from penstock.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from penstock.engine.beams import Beams


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()  # in the queue, holding nothing
    FORKING = auto()  # has a row; waits for the first sample's prompt, or for a beam to go on
    RUNNING = auto()
    SWAPPED = auto()  # in the queue with all of its request that ran, holding swap slots only
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request."""

    request: Request
    index: int
    tokens: list[int]  # prompt and output
    sampling: SequenceSampling
    detokenizer: IncrementalDetokenizer | None
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    row: int = -1  # of the block table, while it has one
    nodes: list[Node] = field(default_factory=list)  # its path in the prefix tree
    slots: list[int] = field(default_factory=list)  # of the swap space, while it is swapped out
    state: int = -1  # the slot of its state, of models that have some; −1 at the beginning
    leaving: list[tuple[int, int]] = field(default_factory=list)  # what its step will leave: after
    # so many tokens, in which slot; the last is its next state
    marks: set[int] = field(default_factory=set)  # after how many tokens states are to be known
    latest: Node | None = None  # the latest after which one is, beside those
    overdue: bool = False  # has waited so long that it goes first
    mates: list[Sequence] = field(default_factory=list)  # to be sampled together; itself included
    shadow: Sequence | None = None  # that guides it
    draft: Draft | None = None  # what may follow, to be verified in the next step
    expected: Prediction | None = None  # of its output, where the request has one
    ways: list[list[int]] = field(default_factory=list)  # blocks of all ways through it but one
    preempted: PreemptionRecord | None = None  # the last time, until what it cost is known
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

    @property
    def keys(self) -> list[int]:
        """What its blocks are found by: its tokens, with what it sees in their places."""
        seen = self.request.seen
        return self.tokens if seen is None else seen.keyed(self.tokens)

    @property
    def shift(self) -> int:
        """Of the positions that its outputs turn by from their places in the sequence."""
        seen = self.request.seen
        return 0 if seen is None or seen.turning is None else seen.turning.shift

    @property
    def owner(self) -> Request:
        """The request that it works for."""
        return self.request.guides or self.request

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def longest(self) -> int:
        """Tokens that it has, or its shadow will have."""
        shadow = 0 if self.shadow is None else self.shadow.num_prompt + self.num_output
        return max(len(self.tokens), shadow)

    def shorten_draft(self, most: int) -> int:
        """Keep so many tokens of its draft at most; how many it has then."""
        if self.draft is not None:
            self.draft.settle(min(most, len(self.draft)))
            if not self.draft.tokens:
                self.draft = None
        return len(self.states) - 1

    @property
    def draft_depth(self) -> int:
        """Positions that its draft goes beyond its tokens."""
        return 0 if self.draft is None else self.draft.depth

    @property
    def remaining(self) -> int:
        """Tokens that still have to be computed before the next can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is the last token that was sampled."""
        length = len(self.tokens)
        return length > self.num_prompt and length == self.num_computed + 1

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt comes next, or what was computed before it gave way."""
        again = self.preempted is not None and self.preempted.redo_tokens > 0
        return again or self.num_computed < self.num_prompt

    @property
    def num_guesses(self) -> int:
        """Tokens of its draft."""
        return 0 if self.draft is None else len(self.draft)

    @property
    def states(self) -> list[SequenceSampling]:
        """What it is sampled by: its own state, and those after each token of its draft."""
        return [self.sampling] if self.draft is None else self.draft.states

    @property
    def reads_prompt(self) -> bool:
        """Whether the logits of every row of its prompt are still wanted."""
        return self.request.reads_prompt and not self.num_output

    @property
    def reads_logits(self) -> bool:
        """Whether it is logits that are wanted of its prompt's rows."""
        return self.reads_prompt and self.request.params.prompt_logprobs is not None

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served."""
        return (self.request.arrival, self.index)

    @property
    def text(self) -> str:
        """The output so far, as text that can be shown."""
        return "" if self.detokenizer is None else self.detokenizer.text

    def completion(self) -> CompletionOutput:
        """What there is of it now."""
        output = self.tokens[self.num_prompt :]
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=output,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False, slots=True)
class Request:
    """One call: a prompt and `params.n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int  # counts requests
    stream: bool  # an output after every step, not only the last
    metrics: RequestMetrics
    options: RequestOptions = field(default_factory=RequestOptions)
    adapter: Adapter | None = None  # that it runs with
    expected: Expected | None = None  # what its outputs should be
    num_uncached: int = 0  # of the prompt's tokens, on arrival
    sequences: list[Sequence] = field(default_factory=list)
    num_counted: int = 0  # of the prompt's tokens, in the engine's counters
    live: int = 0  # of the sequences: those that haven't finished
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None
    seen: Seen | None = None  # its pictures, where it has some
    sought: bool = False  # whether its prompt was looked for on disk
    fetched: bool = False  # whether what there was of it has been read
    reading: bool = False  # whether more of it is read before it starts
    read_to: int = 0  # blocks that were read, or there, when that was last done
    beams: Beams | None = None  # where its sequences are those of one search
    guides: Request | None = None  # whose samples its sequences are the shadows of
    taken_back: list[int] = field(default_factory=list)  # the given prompt's end, to choose anew
    prefix: bytes = b""  # of the tokens that were taken back: what the output begins with

    @property
    def given(self) -> list[int]:
        """The prompt as it was given."""
        return self.prompt_token_ids + self.taken_back

    @property
    def salt(self) -> Hashable:
        """Who finds its blocks in the prefix tree: those with the same."""
        salt = self.options.cache_salt
        return salt if self.adapter is None else (self.adapter.number, salt)

    @property
    def finished(self) -> bool:
        return self.live == 0

    @property
    def reads_prompt(self) -> bool:
        """Whether every row of its prompt is read, so that none may come from the cache."""
        return self.params.prompt_logprobs is not None

    def output(self) -> RequestOutput:
        """The request's state as its caller sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.given,
            outputs=[s.completion() for s in self.sequences]
            if self.beams is None
            else self.beams.completions(),
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            num_taken_back=len(self.taken_back),
        )

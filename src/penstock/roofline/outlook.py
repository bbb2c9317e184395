"""What requests of one size take and cost at the floor, without a run.

Sources: the decode floor and arithmetic intensity, Williams et al. 2009 (roofline); prices a
million tokens as providers quote them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.hardware import AnyPeaks
from penstock.roofline.cost import CostModel
from penstock.roofline.counts import StepSize
from penstock.roofline.floor import Bound, floor_of

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike, so many of them at a time."""

    input_len: int  # tokens of a prompt
    output_len: int  # tokens of an answer
    concurrency: int = 1  # sequences that decode together
    cached_len: int = 0  # of a prompt's tokens, those that are found in the cache
    chunk: int = 2048  # tokens of a prompt that one step takes at most

    @property
    def tokens(self) -> int:
        """Of one request."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Outlook:
    """Floors of a load; divide them by the share that a benchmark has shown.

    A prompt has steps of its own here. An engine that puts several short ones into a step, or
    decoding rows beside them, reads the weights fewer times: of many requests that overlap it may
    be faster than `request_s` says.
    """

    load: Load
    prefill_s: float  # one prompt, alone
    prefill_bound: Bound  # of its first step
    decode_s: float  # one step of all sequences, on average
    decode_bound: Bound  # of the last one

    @property
    def request_s(self) -> float:
        """Of the machine's time that one request takes of it, the others' steps left out."""
        steps = self.load.output_len - 1  # the prompt gives the first token
        return self.prefill_s + steps * self.decode_s / self.load.concurrency

    @property
    def requests_per_s(self) -> float:
        return 1.0 / self.request_s

    @property
    def output_tokens_per_s(self) -> float:
        """Of all requests together, prompts read in between."""
        return self.load.output_len / self.request_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of all sequences together while no prompt is read."""
        return self.load.concurrency / self.decode_s

    def usd_per_million_input(self, usd_hour: float) -> float:
        """Of a prompt's tokens, those found in the cache counted."""
        return usd_hour / 3600 * self.prefill_s / self.load.input_len * MILLION

    def usd_per_million_output(self, usd_hour: float) -> float:
        """Of an answer's tokens, the first of which its prompt has given."""
        decode = self.request_s - self.prefill_s
        return usd_hour / 3600 * decode / self.load.output_len * MILLION


def outlook(costs: CostModel, peaks: AnyPeaks, load: Load) -> Outlook:
    """The floors of `load`: its prompt in chunks, then every decoding step."""
    prefill = 0.0
    first: Bound | None = None
    for start in range(load.cached_len, load.input_len, load.chunk):
        end = min(start + load.chunk, load.input_len)
        size = StepSize([end - start], [end], int(end == load.input_len))
        size.experts = costs.expected_experts(end - start)
        floor = floor_of(costs.cost(size), peaks)
        prefill += floor.seconds
        first = first or floor.bound
    steps = max(load.output_len - 1, 1)
    many, decode = load.concurrency, 0.0
    experts = costs.expected_experts(many)
    for step in range(1, steps + 1):
        size = StepSize([1] * many, [load.input_len + step] * many, many, experts=experts)
        floor = floor_of(costs.cost(size), peaks)
        decode += floor.seconds
    assert first is not None  # a prompt has a token that isn't found
    return Outlook(load, prefill, first, decode / steps, floor.bound)

"""Who goes first: the order of waiting requests, and of running ones when one must give way.

A policy is a key, and the lower goes first. Keys don't change while a request waits, so the queue
is a heap. Ties go by arrival.

fcfs      first come, first served
priority  the lowest `RequestOptions.priority`, as in vLLM
sjf       shortest job first: the fewest prompt tokens that weren't cached on arrival
edf       earliest deadline first: Liu & Layland 1973, doi:10.1145/321738.321743
"""

from __future__ import annotations

import math
from typing import Protocol

from penstock.config import SchedulerConfig
from penstock.engine.options import RequestOptions
from penstock.engine.request import Request
from penstock.errors import RequestError


class Policy(Protocol):
    """An order of sequences."""

    @property
    def name(self) -> str:
        """As in `SchedulerConfig.policy`."""
        ...

    @property
    def preempts(self) -> bool:
        """Whether a waiting request may take the place of a running one that ranks lower."""
        ...

    def key(self, request: Request) -> float:
        """The lower, the sooner. It changes once at most, with the request's first token."""
        ...


class FirstComeFirstServed:
    """By arrival, which breaks the ties of a key that is always the same."""

    name = "fcfs"
    preempts = False

    def key(self, request: Request) -> float:
        return 0.0


class ByPriority:
    """By the number that the request brings: 0 unless it says otherwise, below 0 goes before."""

    name = "priority"
    preempts = True

    def key(self, request: Request) -> float:
        return request.options.priority


class ShortestJobFirst:
    """By the prompt tokens to compute, counted on arrival: what is cached later changes nothing."""

    name = "sjf"
    preempts = False

    def key(self, request: Request) -> float:
        return request.num_uncached


class EarliestDeadlineFirst:
    """By the time at which a token is wanted; without a target never, and so after all others.

    Until its first token, a request's deadline is its arrival + `ttft_slo_s`. From then on it is
    that of the second, the first token's time + `tpot_slo_s`, and stands for all that follow: if
    it moved with every token, two that run could overtake each other with every token.
    """

    name = "edf"
    preempts = True

    def __init__(self, ttft_slo_s: float | None, tpot_slo_s: float | None) -> None:
        """Targets of requests that don't bring their own."""
        self._ttft_s = math.inf if ttft_slo_s is None else ttft_slo_s
        self._tpot_s = math.inf if tpot_slo_s is None else tpot_slo_s

    def key(self, request: Request) -> float:
        # a shadow's tokens are those of the request that it guides
        metrics, options = (request.guides or request).metrics, request.options
        if metrics.token_times:
            target = options.tpot_slo_s
            return metrics.token_times[0] + (self._tpot_s if target is None else target)
        target = options.ttft_slo_s
        return metrics.arrival_time + (self._ttft_s if target is None else target)


def policy_of(config: SchedulerConfig) -> Policy:
    """The policy that `config` names."""
    if config.policy == "edf":
        return EarliestDeadlineFirst(config.ttft_slo_s, config.tpot_slo_s)
    if config.policy == "priority":
        return ByPriority()
    return ShortestJobFirst() if config.policy == "sjf" else FirstComeFirstServed()


def check_options(policy: Policy, options: RequestOptions) -> None:
    """Raises RequestError for a wish that `policy` can't heed."""
    for wish, heeds in (("priority", "priority"), ("ttft_slo_s", "edf"), ("tpot_slo_s", "edf")):
        value = getattr(options, wish)
        if value and policy.name != heeds:
            raise RequestError(
                f"{wish}={value} has no effect: requests are scheduled by policy={policy.name!r}. "
                f"Leave it out, or start the engine with policy={heeds!r}."
            )

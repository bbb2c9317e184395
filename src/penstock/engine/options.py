"""What a request asks of the scheduler and the cache, not of the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import RequestError


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Where a request stands in the queue, how soon it is wanted, what is kept of its prompt."""

    priority: int = 0  # the lower, the sooner, as in vLLM
    ttft_slo_s: float | None = None  # the first token is wanted within this time of its arrival
    tpot_slo_s: float | None = None  # and each further one within this time of the one before
    cache_salt: str | None = None  # cached prefixes are found only by requests with the same
    pin_tokens: int = 0  # this much of the prompt's start stays cached …
    pin_ttl_s: float = 300.0  # … for this long after it was last asked for

    def __post_init__(self) -> None:
        for name in ("priority", "pin_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name} must be an integer, not {value!r}.")
        if abs(self.priority) >= 1 << 31:
            raise RequestError(f"priority is {self.priority}; it must fit into 32 bits.")
        if self.pin_tokens < 0:
            raise RequestError(f"pin_tokens is {self.pin_tokens}; it can't be negative.")
        for name in ("ttft_slo_s", "tpot_slo_s", "pin_ttl_s"):
            value = getattr(self, name)
            if value is None and name != "pin_ttl_s":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise RequestError(f"{name} must be a positive number of seconds, not {value!r}.")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be a text, not {self.cache_salt!r}.")
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty. Leave it out to share the cache with all.")

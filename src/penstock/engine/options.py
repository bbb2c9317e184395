"""What a request asks of the scheduler and the cache, not of the sampler."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from penstock.engine.pictures import check_pictures
from penstock.errors import RequestError
from penstock.models.vision.pictures import Picture
from penstock.runtime.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the whole blocks of a prompt's first `tokens` cached …"""

    tokens: int
    ttl_s: float = 300.0  # … for this long after they were last asked for

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise RequestError(f"A pin's tokens must be an integer from 0 on, not {self.tokens!r}.")
        check_seconds("A pin's ttl_s", self.ttl_s)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Where a request stands in the queue, how soon it is wanted, what is kept of its prompt."""

    priority: int = 0  # the lower, the sooner, as in vLLM
    ttft_slo_s: float | None = None  # the first token is wanted within this time of its arrival
    tpot_slo_s: float | None = None  # and each further one within this time of the one before
    cache_salt: str | None = None  # cached prefixes are found only by requests with the same
    pins: tuple[Pin, ...] = ()  # how much of the prompt's start stays cached, and for how long
    prediction: str | tuple[int, ...] | None = None  # the output that is expected, or much like it
    adapter: str | Adapter | None = None  # the name of a LoRA adapter that is loaded, or one held
    pictures: tuple[Picture, ...] = ()  # that tokens of the prompt stand for
    hand_over: bool = False  # ends when its prompt's blocks are on disk: another process goes on

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be an integer, not {self.priority!r}.")
        if abs(self.priority) >= 1 << 31:
            raise RequestError(f"priority is {self.priority}; it must fit into 32 bits.")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            if (value := getattr(self, name)) is not None:
                check_seconds(name, value)
        if not isinstance(self.pins, tuple) or not all(isinstance(x, Pin) for x in self.pins):
            raise RequestError(f"pins must be a tuple of Pin, not {self.pins!r}.")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be a text, not {self.cache_salt!r}.")
        if not isinstance(self.adapter, str | Adapter | None):
            raise RequestError(
                f"adapter must be a loaded adapter's name, not {self.adapter!r:.80}."
            )
        check_pictures(self.pictures)
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty. Leave it out to share the cache with all.")
        given: object = self.prediction
        if not isinstance(given, str | tuple | None):
            kind = type(given).__name__
            raise RequestError(f"prediction must be a text or a tuple of token ids, not {kind}.")
        if given is not None and not given:
            raise RequestError("prediction is empty. Leave it out where nothing is expected.")


def check_seconds(name: str, value: Any) -> None:
    """Raises RequestError for what isn't a length of time."""
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise RequestError(f"{name} must be a positive number of seconds, not {value!r:.80}.")


def check_time(name: str, value: Any) -> None:
    """Raises RequestError for what isn't a time of some clock, in seconds."""
    if not _is_number(value) or not abs(value) <= sys.float_info.max:
        raise RequestError(
            f"{name} must be a time in seconds, as time.monotonic() says it, not {value!r:.80}."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

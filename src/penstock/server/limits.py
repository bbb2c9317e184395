"""Who may start a request now: a bounded queue, and rates and numbers of each key.

A rate is a token bucket: a minute's worth may be used at once, and comes back evenly. What a
request really used is only known at its end, so a bucket of tokens may go below zero; requests
are refused until it is back above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from penstock.server.errors import ApiError
from penstock.server.keys import Key

_MINUTE_S = 60.0
_ROUNDING = 1e-9  # of a bucket: what comes back in two parts may be less than in one by this


class Bucket:
    """So many a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._clock = clock
        self._at = clock()

    def refill(self) -> None:
        """Add what has come back since the last time."""
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._at) * self._size / _MINUTE_S)
        self._at = now

    def wait_s(self, amount: float) -> float:
        """How long until `amount` can be taken; 0 where it can now."""
        self.refill()
        missing = amount - self._level
        return 0.0 if missing <= _ROUNDING * self._size else missing * _MINUTE_S / self._size

    def take(self, amount: float) -> None:
        """Use it up, below zero if need be."""
        self._level -= amount


class Account:
    """What one key has running, and has left of its rates."""

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self.key = key
        self.running = 0
        limits = key.limits
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    def admit(self, count: int, samples: int = 1) -> None:
        """Count `count` prompts. Raises ApiError 429 when that is too many now, 400 for ever.

        samples: of each prompt; each runs beside the others.
        """
        limits = self.key.limits
        at_once = limits.max_concurrency
        self._check_possible(count, samples)
        if at_once is not None and self.running + count * samples > at_once:
            raise ApiError(
                429,
                f"{self.running} answers to this key are being made, and {at_once} may be at once. "
                "Wait until one has ended.",
                code="concurrency_limit_exceeded",
                retry_after_s=1.0,
            )
        asked = (
            (self._requests, count, limits.requests_per_minute, "requests"),
            (self._tokens, 1, limits.tokens_per_minute, "tokens"),
        )
        for bucket, amount, allowed, what in asked:
            wait = 0.0 if bucket is None else bucket.wait_s(amount)
            if wait > 0:
                raise ApiError(
                    429,
                    f"This key may use {allowed} {what} a minute and has used them. Try again in "
                    f"{wait:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait + 0.5,
                )
        if self._requests is not None:
            self._requests.take(count)
        self.running += count * samples

    def _check_possible(self, count: int, samples: int) -> None:
        """Raises ApiError for more in one request than the key may ever have."""
        limits = self.key.limits
        for most, asked, when, code in (
            (limits.max_concurrency, count * samples, "at once", "concurrency_limit_exceeded"),
            (limits.requests_per_minute, count, "a minute", "rate_limit_exceeded"),
        ):
            if most is not None and asked > most:
                what = "prompts" if asked == count else "answers"
                raise ApiError(
                    400,
                    f"{asked:,} {what} in one request; this key may have {most:,} {when}. Send "
                    "several requests.",
                    param=None if asked == count else "n",
                    code=code,
                )

    def settle(self, tokens: int, samples: int = 1) -> None:
        """One prompt and its samples have ended, having used so many tokens."""
        self.running -= samples
        if self._tokens is not None:
            self._tokens.refill()
            self._tokens.take(tokens)


class Gate:
    """Lets requests through, key by key and all together."""

    def __init__(
        self,
        max_queue_size: int,
        keys: Iterable[Key],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_queue = max_queue_size
        self._accounts = {key.name: Account(key, clock) for key in keys}

    def admit(
        self, key: Key, count: int, samples: int, waiting: int, each_s: float | None, room: int = 0
    ) -> Account:
        """Count `count` prompts of `key`, with `samples` each; `settle` each when it has ended.

        waiting: prompts that don't run yet; room: how many of them will with the next step; each_s:
        what one takes lately, for `Retry-After`.
        Raises ApiError 429 when the queue is full or the key's limits are reached.
        """
        if waiting + count > self._max_queue + room:
            waiting = max(waiting - room, 0)
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and {self._max_queue} may. Try again later.",
                code="queue_full",
                retry_after_s=min(60.0, max(1.0, (each_s or 1.0) * waiting / 8)),
            )
        account = self._accounts[key.name]
        account.admit(count, samples)
        return account


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)

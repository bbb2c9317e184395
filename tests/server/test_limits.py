"""Rates and numbers of requests, by a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from penstock.server import Key, Limits
from penstock.server.errors import ApiError
from penstock.server.limits import Account, Bucket, Gate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _account(clock: Clock, **limits: int) -> Account:
    return Account(Key.of("x", "x", Limits(**limits)), clock)


def _refused(call: object, *arguments: object) -> ApiError:
    with pytest.raises(ApiError) as error:
        call(*arguments)  # type: ignore[operator]
    return error.value


def _level(size: float, events: list[tuple[float, float]], now: float, start: float) -> float:
    """The level by its closed form, which knows no steps.

    Had the bucket been full at s, it would hold size + rate · (now − s) − what was taken since;
    it holds the least of these over all s: the start, each moment before a take, and now.
    """
    rate = size / 60
    levels = [size, size + rate * (now - start) - sum(amount for _, amount in events)]
    for i, (moment, _) in enumerate(events):
        taken = sum(amount for _, amount in events[i:])
        levels.append(size + rate * (now - moment) - taken)
    return min(levels)


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_its_closed_form(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    size = rng.choice([1, 7, 60, 1000])
    bucket = Bucket(size, clock)
    events: list[tuple[float, float]] = []
    start = clock.now
    for _ in range(60):
        clock.now += rng.choice([0.0, 0.25, 1.0, 17.5, 90.0]) * rng.random()
        amount = rng.random() * size / 2
        level = _level(size, events, clock.now, start)
        expected = max(0.0, (amount - level) * 60 / size)
        assert bucket.wait_s(amount) == pytest.approx(expected, abs=1e-6)
        if rng.random() < 0.7:
            bucket.take(amount)  # also where that is more than there is
            events.append((clock.now, amount))


def test_a_minutes_worth_at_once_then_evenly() -> None:
    clock = Clock()
    account = _account(clock, requests_per_minute=6)
    for _ in range(6):
        account.admit(1)
    error = _refused(account.admit, 1)
    assert error.status == 429
    assert error.code == "rate_limit_exceeded"
    assert "6 requests a minute" in error.message
    assert int(error.headers["Retry-After"]) >= 10
    clock.now += 9.99
    _refused(account.admit, 1)
    clock.now += 0.01
    account.admit(1)
    _refused(account.admit, 1)
    clock.now += 3600  # no more than a minute's worth is saved up
    account.admit(6)
    _refused(account.admit, 1)


@pytest.mark.parametrize("per_minute", [1, 3, 7, 59, 61, 997])
def test_whoever_waits_as_told_is_let_in(per_minute: int) -> None:
    for count in range(1, min(per_minute, 30) + 1):
        clock = Clock()
        account = _account(clock, requests_per_minute=per_minute)
        clock.now += 0.123
        account.admit(per_minute)
        error = _refused(account.admit, count)
        clock.now += int(error.headers["Retry-After"])
        account.admit(count)


def test_exactly_the_time_is_enough() -> None:
    clock = Clock()
    for per_minute in range(1, 200):
        account = _account(clock, requests_per_minute=per_minute)
        account.admit(per_minute)
        for _ in range(5):
            clock.now += 60 / per_minute
            account.admit(1)


def test_tokens_are_counted_at_the_end() -> None:
    clock = Clock()
    account = _account(clock, tokens_per_minute=600)
    account.admit(1)
    account.admit(1)
    account.settle(900)  # more than a minute has: 300 below zero
    account.settle(0)
    assert account.running == 0
    error = _refused(account.admit, 1)
    assert "600 tokens a minute" in error.message
    assert int(error.headers["Retry-After"]) >= 30
    clock.now += 30.0
    _refused(account.admit, 1)
    clock.now += 0.1  # one token has come back
    account.admit(1)


def test_so_many_at_once() -> None:
    account = _account(Clock(), max_concurrency=2)
    account.admit(2)
    error = _refused(account.admit, 1)
    assert error.code == "concurrency_limit_exceeded"
    assert "2 answers to this key are being made" in error.message
    account.settle(5)
    account.admit(1)
    assert account.running == 2


def test_samples_count_too() -> None:
    account = _account(Clock(), max_concurrency=6, requests_per_minute=3)
    never = _refused(account.admit, 1, 7)
    assert (never.status, never.param) == (400, "n")
    assert "7 answers in one request; this key may have 6 at once" in never.message
    account.admit(2, 2)  # two prompts, four answers
    assert account.running == 4
    assert _refused(account.admit, 1, 3).code == "concurrency_limit_exceeded"
    account.settle(10, 2)
    account.admit(1, 4)
    assert account.running == 6
    account.settle(10, 2)
    account.settle(10, 4)
    assert account.running == 0
    assert _refused(account.admit, 1).code == "rate_limit_exceeded"  # three prompts were sent


def test_a_refusal_takes_nothing() -> None:
    clock = Clock()
    account = _account(clock, requests_per_minute=4, max_concurrency=2)
    account.admit(2)
    for _ in range(10):
        _refused(account.admit, 1)
    account.settle(1)
    account.settle(1)
    account.admit(2)  # the two that are left of four
    assert account.running == 2


def test_what_can_never_be_let_in_isnt_told_to_wait() -> None:
    many = _refused(_account(Clock(), requests_per_minute=4).admit, 5)
    assert (many.status, many.code) == (400, "rate_limit_exceeded")
    assert "Retry-After" not in many.headers
    once = _refused(_account(Clock(), max_concurrency=4).admit, 5)
    assert (once.status, once.code) == (400, "concurrency_limit_exceeded")
    assert "5" in once.message and "4" in once.message


def test_without_limits_everything_passes() -> None:
    account = _account(Clock())
    account.admit(100_000)
    for _ in range(100_000):
        account.settle(10**6)
    assert account.running == 0


def test_the_queue_is_bounded_for_all_keys_together() -> None:
    clock = Clock()
    one, other = Key.of("a", "one"), Key.of("b", "other", Limits(requests_per_minute=1))
    gate = Gate(10, (one, other), clock)
    assert gate.admit(one, 3, 1, waiting=7, each_s=None).running == 3
    full = _refused(gate.admit, one, 4, 1, 7, 2.0)
    assert (full.status, full.code) == (429, "queue_full")
    assert "7 requests are waiting" in full.message
    assert 1 <= int(full.headers["Retry-After"]) <= 60
    assert int(_refused(gate.admit, one, 1, 1, 10**9, 30.0).headers["Retry-After"]) == 60
    assert int(_refused(gate.admit, one, 11, 1, 0, None).headers["Retry-After"]) == 1
    assert gate.admit(other, 1, 1, waiting=0, each_s=None).key is other
    _refused(gate.admit, other, 1, 1, 0, None)
    assert gate.admit(one, 1, 1, waiting=0, each_s=None).running == 4

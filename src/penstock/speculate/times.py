"""How long steps take, by the number of sequences and of drafts' tokens: measured, and between."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

NEWEST = 0.1
"""The weight of the newest step in the average of those like it."""

SURE = 3
"""Steps of a kind that must have been seen before one believes that they take long."""

ASSUMED_SLOPE = 0.03
"""What a draft's token adds to a step, as a share of it, until two lengths were measured."""

SOONEST, LATEST = 80, 320
"""Steps after which plain ones are measured anew, where few of them have come: at first, and each
time twice as many, up to the second. SURE of the latter are less than a hundredth."""

FAR = 1.5
"""Steps of a kind differ less, unless they were held up or the machine's speed has changed."""

RECENT = 20
"""Steps ago; what was seen longer ago weighs less where it contradicts what was seen since."""

OLD = 2000
"""Steps ago; the machine may have been another since."""

ENOUGH = 20
"""Plain steps among those after which the average has followed whatever has changed."""

Point = tuple[int, float]
"""Tokens in drafts, and the seconds that steps with so many take."""


@dataclass(slots=True)
class _Average:
    """Seconds of steps with drafts of one length; a step can be held up, but not hurried."""

    seconds: float
    count: int = 0  # of the steps that it is made of
    last: int = 0  # the number of the last one
    longer: int = 0  # of the last ones: how many took far longer

    def see(self, seconds: float, number: int) -> bool:
        """A step took so long; whether it has to be believed that they take far longer now."""
        self.last = number
        mean, count = self.seconds, self.count + 1
        if count <= SURE or seconds > FAR * mean or seconds * FAR < mean:
            return self._doubt(seconds)
        self.count, self.longer = count, 0
        share = NEWEST if count * NEWEST > 1.0 else 1.0 / count
        self.seconds = mean + share * (seconds - mean)
        return False

    def _doubt(self, seconds: float) -> bool:
        """See what is among the first ones or far from the others.

        Of the first ones the shortest counts. One that is far shorter is believed, one that is far
        longer when it is the last of SURE in a row: that is the machine whose speed has changed.
        """
        self.count += 1
        self.longer = self.longer + 1 if seconds > FAR * self.seconds else 0
        rises = self.longer >= SURE
        if self.count == 1 or rises or seconds * FAR < self.seconds:
            self.seconds, self.longer = seconds, 0
            self.count = min(self.count, SURE)
        elif self.count <= SURE:
            self.seconds = min(self.seconds, seconds)
        else:
            share = max(NEWEST, 1.0 / self.count)
            self.seconds += share * (min(seconds, FAR * self.seconds) - self.seconds)
        return rises


@dataclass(slots=True)
class _Alike:
    """Steps of batches that are taken for alike."""

    averages: dict[int, _Average] = field(default_factory=dict)  # by drafts' tokens
    number: int = 0  # of steps
    plain: int = 0  # of these: without drafts, since that was last looked at
    patience: int = SOONEST
    until: int = SOONEST  # the step at which it is looked at again

    def see(self, drafted: int, seconds: float) -> float:
        """A step took so long; how long plain ones do."""
        self.number += 1
        average = self.averages.get(drafted)
        if average is None:
            average = self.averages[drafted] = _Average(seconds)
        rises = average.see(seconds, self.number)
        if not drafted:
            self.plain += 1
            if rises:  # if all of them were held up, drafts will seem to pay
                self.patience = ENOUGH
                self.until = self.number + ENOUGH
        if self.number >= self.until:
            self._look()
        plain = self.averages.get(0) if drafted else average
        return 0.0 if plain is None else plain.seconds

    def _look(self) -> None:
        """Forget how many plain steps were seen where few were of late: they are measured anew.

        Else drafts that seem to pay, as plain steps were held up or the machine was slower, would
        go on for good: while they do, hardly a step is plain.
        """
        if self.plain < ENOUGH and 0 in self.averages:
            self.averages[0].count = 0
        self.plain = 0
        self.patience = min(2 * self.patience, LATEST)
        self.until = self.number + self.patience

    def _is_old(self, drafted: int) -> bool:
        return self.number - self.averages[drafted].last > OLD

    def seconds(self, most: int) -> list[float]:
        """StepTimes.seconds"""
        known = sorted(self.averages.items())
        sure = [(n, one.seconds) for n, one in known if one.count >= SURE]
        newest = [(n, self.averages[n].seconds) for n, _ in sure if not self._is_old(n)]
        if len(newest) > 1:
            sure = newest
        sure = sure or [(known[0][0], known[0][1].seconds)]
        slope, points, counts = _slope(sure), [], []
        least, since = math.inf, 0  # of longer drafts, and when that was seen
        for n, one in reversed(known):
            value = one.seconds
            if one.count < SURE or (len(newest) > 1 and self._is_old(n)):
                value = min(value, _between(sure, slope, n))
            if value < least:
                least, since = value, one.last
            elif value > FAR * least and one.last < since:
                value = least
            points.append((n, value))
            weight = min(max(one.count, 1), 1.0 / NEWEST)
            counts.append(weight / (1.0 + (self.number - one.last) / RECENT))
        ascending = _ascending([value for _, value in reversed(points)], counts[::-1])
        rising = list(zip((n for n, _ in known), ascending, strict=True))
        return [_between(rising, slope, n) for n in range(most + 1)]


class StepTimes:
    """Seconds of steps that only decode.

    mixed: steps with sequences that can't have drafts. They may be those that take long, and are
    kept apart.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, bool], _Alike] = {}
        self._alone: dict[int, _Alike] = {}  # by batch: those of its class
        self._mixed: dict[int, _Alike] = {}

    def see(self, batch: int, drafted: int, seconds: float, *, mixed: bool = False) -> float:
        """A step took so long; how long plain ones do."""
        return self._of(batch, mixed).see(drafted, seconds)

    def plain(self, batch: int, *, mixed: bool = False) -> tuple[float, int]:
        """Seconds of a step without drafts, and how many were seen; 0 of them, too, when it is
        time to measure them again."""
        plain = self._of(batch, mixed).averages.get(0)
        return (0.0, 0) if plain is None else (plain.seconds, plain.count)

    def _of(self, batch: int, mixed: bool) -> _Alike:
        known = self._mixed if mixed else self._alone
        alike = known.get(batch)
        if alike is None:
            key = (class_of(batch), mixed)
            alike = known[batch] = self._classes.setdefault(key, _Alike())
        return alike

    def seconds(self, batch: int, most: int, *, mixed: bool = False) -> list[float]:
        """Predicted for 0 … `most` tokens in drafts, [most + 1]; never less for more of them.

        What was seen only once or twice is taken for no slower than the rest makes one expect: it
        may have been held up by something else, and is tried again. So is what was seen long ago;
        and it is taken for no slower than longer drafts have been since.
        """
        return self._of(batch, mixed).seconds(most)


def _slope(points: Sequence[Point]) -> float:
    """Seconds a token, over all of them."""
    (low, first), (high, last) = points[0], points[-1]
    return max(last - first, 0.0) / (high - low) if high > low else ASSUMED_SLOPE * first


def _between(points: Sequence[Point], slope: float, at: int) -> float:
    """By the line between two neighbours, or along the slope beyond the last."""
    place = bisect_left(points, (at, 0.0))
    if place == len(points):
        n, value = points[-1]
        return value + slope * (at - n)
    if place == 0 or points[place][0] == at:
        return points[place][1]
    (low, first), (high, last) = points[place - 1], points[place]
    return first + (last - first) * (at - low) / (high - low)


def _ascending(values: Sequence[float], counts: Sequence[float]) -> list[float]:
    """The values nearest to some that never fall; counts: how much each weighs.

    Neighbours that fall are taken together: Ayer et al. 1955, doi:10.1214/aoms/1177728423.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, places)
    for value, count in zip(values, counts, strict=True):
        mean, weight, places = value, count, 1
        while pools and pools[-1][0] >= mean:
            before, more, others = pools.pop()
            mean = (mean * weight + before * more) / (weight + more)
            weight, places = weight + more, places + others
        pools.append((mean, weight, places))
    return [mean for mean, _, places in pools for _ in range(places)]


def class_of(batch: int) -> int:
    """Batches that are taken for alike."""
    return batch if batch <= 4 else 4 + (batch - 1).bit_length()

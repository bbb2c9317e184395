"""How long steps take, by the number of sequences and of drafts' tokens: measured, and between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

NEWEST = 0.1
"""The weight of the newest step in the average of those like it."""

SURE = 3
"""Steps of a kind that must have been seen before one believes that they take long."""

ASSUMED_SLOPE = 0.03
"""What a draft's token adds to a step, as a share of it, until two lengths were measured."""

Point = tuple[int, float]
"""Tokens in drafts, and the seconds that steps with so many take."""


class StepTimes:
    """Seconds of steps that only decode."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, list[float]]] = {}  # batch → tokens → [seconds, count]

    def see(self, batch: int, drafted: int, seconds: float) -> None:
        """A step took so long; one that was held up counts as half as long again at most."""
        known = self._seen.setdefault(_class_of(batch), {})
        entry = known.setdefault(drafted, [seconds, 0.0])
        bounded = min(max(seconds, 0.5 * entry[0]), 1.5 * entry[0])
        entry[1] += 1.0
        entry[0] += max(NEWEST, 1.0 / entry[1]) * (bounded - entry[0])

    def plain(self, batch: int) -> tuple[float, int]:
        """Seconds of a step without drafts, and how many were seen."""
        seconds, count = self._seen.get(_class_of(batch), {}).get(0, (0.0, 0.0))
        return seconds, int(count)

    def seconds(self, batch: int, most: int) -> list[float]:
        """Predicted for 0 … `most` tokens in drafts, [most + 1]; never less for more of them.

        What was seen only once or twice is taken for no slower than the rest makes one expect: it
        may have been held up by something else, and is tried again.
        """
        known = self._seen[_class_of(batch)]
        seen = sorted((n, value, count) for n, (value, count) in known.items())
        sure = [(n, value) for n, value, count in seen if count >= SURE] or [seen[0][:2]]
        slope = _slope(sure)
        points, counts = [], []
        for n, value, count in seen:
            expected = value if count >= SURE else _between(sure, slope, n)
            points.append((n, min(value, expected)))
            counts.append(min(count, 1.0 / NEWEST))
        rising = list(zip((n for n, _ in points), _ascending(points, counts), strict=True))
        return [_between(rising, slope, n) for n in range(most + 1)]


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


def _ascending(points: Sequence[Point], counts: Sequence[float]) -> list[float]:
    """The values nearest to those of some points that never fall; counts: how much each weighs.

    Neighbours that fall are taken together: Ayer et al. 1955, doi:10.1214/aoms/1177728423.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, places)
    for (_, value), count in zip(points, counts, strict=True):
        mean, weight, places = value, count, 1
        while pools and pools[-1][0] >= mean:
            before, more, others = pools.pop()
            mean = (mean * weight + before * more) / (weight + more)
            weight, places = weight + more, places + others
        pools.append((mean, weight, places))
    return [mean for mean, _, places in pools for _ in range(places)]


def _class_of(batch: int) -> int:
    """Batches that are taken for alike."""
    return batch if batch <= 4 else 4 + (batch - 1).bit_length()

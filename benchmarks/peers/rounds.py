"""The measurement: in each round every engine once, one process at a time, in rotating order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peers.protocol import Format, Peer, PeerError, Settings, Work

from penstock.hardware import Peaks

T = TypeVar("T")


@dataclass(slots=True)
class Contender:
    """One peer with weights in one format, and what its runs gave."""

    peer: Peer
    form: Format
    weight_bytes: int  # read for each token
    model: Path
    samples: dict[str, list[float | None]] = field(default_factory=dict)  # by work, one a round
    error: str | None = None  # ends its part in the comparison

    @property
    def label(self) -> str:
        return f"{self.peer.name} {self.form.name}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "peer": self.peer.name,
            "format": self.form.name,
            "bits": self.form.bits,
            "head": self.form.head,
            "weight_bytes": self.weight_bytes,
            "tokens_per_s": {name: median(values) for name, values in self.samples.items()},
            "samples": self.samples,
            "error": self.error,
        }


def median(values: Sequence[float | None]) -> float | None:
    """Of the rounds that gave a value."""
    given = [value for value in values if value is not None]
    return statistics.median(given) if given else None


def rotated(items: Sequence[T], round_: int) -> list[T]:
    """The order of a round: nobody is always first, or always after the same one."""
    at = round_ % len(items) if items else 0
    return [*items[at:], *items[:at]]


def measure(
    contenders: Sequence[Contender],
    works: Sequence[Work],
    settings: Settings,
    *,
    rounds: int,
    peaks: Callable[[], Peaks],
    say: Callable[[str], None],
    keep: Callable[[int, list[dict[str, Any]]], None] = lambda done, log: None,
) -> None:
    """Fill the contenders' samples.

    keep: told after each round how many are done, whose every run was, and the peaks before and
    after it.
    """
    log: list[dict[str, Any]] = []
    before = peaks()
    for round_ in range(rounds):
        for contender in rotated(contenders, round_):
            speeds: dict[str, float] = {}
            if contender.error is None:
                say(f"round {round_ + 1}/{rounds}: {contender.label}")
                speeds = _run(contender, works, replace(settings, seed=settings.seed + round_))
                after = peaks()
                log.append(
                    {
                        "round": round_,
                        "contender": contender.label,
                        "before": asdict(before),
                        "after": asdict(after),
                    }
                )
                before = after
                say(_line(contender, speeds))
            for work in works:
                contender.samples.setdefault(work.name, []).append(speeds.get(work.name))
        keep(round_ + 1, log)


def _run(contender: Contender, works: Sequence[Work], settings: Settings) -> dict[str, float]:
    """One run; an error is kept and gives nothing."""
    try:
        reply = contender.peer.run(contender.model, contender.form, works, settings)
    except PeerError as error:
        contender.error = str(error)
        return {}
    if reply.weight_bytes is not None:
        contender.weight_bytes = reply.weight_bytes
    return reply.speeds


def _line(contender: Contender, speeds: dict[str, float]) -> str:
    if contender.error is not None:
        return f"    failed: {contender.error}"
    return "    " + ", ".join(f"{name} {speed:,.1f}" for name, speed in speeds.items())

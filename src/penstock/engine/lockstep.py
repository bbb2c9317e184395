"""Sequences that must be sampled in the same step, because each one's token depends on all.

The two of a guided sample, and a request's beams. Nobody makes them start together or keep their
blocks together: whoever has come as far as the last token before a sample waits there, holding what
it has, until the others have come as far. So a plan is made as if they were alone, and then those
that would be sampled without their mates give one token back.

When nothing else can run, those that wait could wait for ever for blocks that others like them
hold. Then the one that ranks lowest gives way, until the first of them has all of its mates.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.plan import Part, Plan
from penstock.engine.request import Sequence, Status

_ABSENT = (Status.FORKING, Status.FINISHED)
"""Mates that needn't be waited for: a fork is sampled with the one whose prompt it shares."""


def hold_back(plan: Plan) -> bool:
    """Take a token from those of a plan whose mates aren't sampled in it; whether there are any."""
    if not any(sequence.mates for sequence, _ in plan.parts):
        return False
    sampled = {sequence for sequence, count in plan.parts if count == sequence.remaining}
    parts: list[Part] = []
    for sequence, count in plan.parts:
        waits = sequence in sampled and any(
            mate not in sampled and mate.status not in _ABSENT for mate in sequence.mates
        )
        if count - waits:
            parts.append((sequence, count - waits))
    held = sum(count for _, count in parts) < plan.num_tokens
    plan.parts, plan.num_tokens = parts, sum(count for _, count in parts)
    return held


def is_held_back(sequence: Sequence) -> bool:
    """Whether a sequence that runs waits as far as the token before a sample, for a mate that
    doesn't run.
    """
    return sequence.remaining == 1 and any(
        mate.status not in (Status.RUNNING, *_ABSENT) for mate in sequence.mates
    )


def together(parts: Iterable[Part]) -> list[list[Part]]:
    """The parts of a plan, mates in one list."""
    groups: dict[int, list[Part]] = {}
    for part in parts:
        mates = part[0].mates
        groups.setdefault(id(mates) if mates else id(part[0]), []).append(part)
    return list(groups.values())

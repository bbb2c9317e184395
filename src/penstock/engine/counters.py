"""Sums for `/metrics`, kept as steps are computed and not only when requests end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.request import Request, Sequence


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the engine was made."""

    prompt: int = 0
    """Of prompts: those found in the cache when a request starts, then each chunk as it is
    computed. What is computed again after giving way isn't counted again, so a request whose prompt
    is complete has added its length."""
    generated: int = 0  # of all samples
    jumped: int = 0  # of these, those that a constraint forced, without a step of their own

    def prompt_computed(self, sequence: Sequence) -> None:
        """`sequence` has come further in its prompt, or again as far."""
        request = sequence.request
        reached = min(sequence.num_computed, sequence.num_prompt)
        if reached > request.num_counted:
            self.prompt += reached - request.num_counted
            request.num_counted = reached


def requests_by_state(
    total: int, running: Iterable[Sequence], swapped: Iterable[Request]
) -> dict[str, int]:
    """Of `total` requests that haven't ended, how many run, wait, and are swapped out.

    A request runs as long as any of its samples does.
    """
    active = {sequence.owner for sequence in running}
    out = len({request.guides or request for request in swapped} - active)
    return {
        "requests_running": len(active),
        "requests_waiting": max(total - len(active) - out, 0),
        "requests_swapped": out,
    }

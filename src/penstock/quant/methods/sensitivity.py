"""Mixed precision: which matrix gets how many bits, from what each loses by itself.

A multiple-choice knapsack, solved greedily along each matrix's lower convex hull: within one step
of the best there is. Losses are taken to add up. Source: Dong et al. 2019, arXiv:1911.03852
(HAWQ-V2); the greedy bound: Sinha & Zoltners 1979, "The multiple-choice knapsack problem".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """One scheme for one matrix."""

    name: str  # of the scheme
    bits: float  # of the whole matrix, scales included
    loss: float  # what the model loses if this matrix alone is so


Table = Mapping[str, Sequence[Choice]]
"""What there is to choose from, by the matrix's module."""


def within_bits(table: Table, budget: float) -> dict[str, str]:
    """The scheme of each matrix: together at most `budget` bits, and the least loss.

    Raises ConfigError where even the smallest choices take more.
    """
    hulls = {module: _hull(choices) for module, choices in table.items()}
    at = dict.fromkeys(hulls, 0)
    used = sum(hull[0].bits for hull in hulls.values())
    if used > budget * (1 + 1e-12):
        raise ConfigError(
            f"The smallest schemes given take {used:,.0f} bits, but the budget is {budget:,.0f}. "
            "Raise it, or offer smaller schemes."
        )
    for module, step in _steps(hulls):
        hull = hulls[module]
        more = hull[step].bits - hull[step - 1].bits
        if at[module] == step - 1 and used + more <= budget * (1 + 1e-12):
            at[module], used = step, used + more
    return {module: hulls[module][i].name for module, i in at.items()}


def within_loss(table: Table, budget: float) -> dict[str, str]:
    """The scheme of each matrix: together at most `budget` of loss, in few bits.

    Raises ConfigError where even the best choices lose more.
    """
    hulls = {module: _hull(choices) for module, choices in table.items()}
    at = dict.fromkeys(hulls, 0)
    lost = sum(hull[0].loss for hull in hulls.values())
    for module, step in _steps(hulls):
        if lost <= budget:
            break
        hull = hulls[module]
        at[module], lost = step, lost + hull[step].loss - hull[step - 1].loss
    if lost > budget:
        raise ConfigError(
            f"The best schemes given lose {lost:.3g}, but the budget is {budget:.3g}. Raise it, or "
            "offer larger schemes."
        )
    return {module: hulls[module][i].name for module, i in at.items()}


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Those on the lower convex hull: each takes more bits, loses less, and by less a bit."""
    if not choices:
        raise ConfigError("A matrix has no scheme to choose from.")
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bits, c.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(a: Choice, b: Choice) -> float:
    """Loss saved a bit from `a` to `b`."""
    return (a.loss - b.loss) / (b.bits - a.bits)


def _steps(hulls: Mapping[str, Sequence[Choice]]) -> list[tuple[str, int]]:
    """Every step along a hull, the one that saves most a bit first."""
    found = [
        (_gain(hull[i - 1], hull[i]), module, i)
        for module, hull in hulls.items()
        for i in range(1, len(hull))
    ]
    return [(module, i) for _, module, i in sorted(found, key=lambda s: (-s[0], s[1], s[2]))]

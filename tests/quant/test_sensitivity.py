"""The knapsack against every combination there is."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.errors import ConfigError
from penstock.quant.methods.sensitivity import Choice, within_bits, within_loss

NAMES = ("small", "middle", "large")


def random_table(seed: int) -> dict[str, list[Choice]]:
    random = torch.Generator().manual_seed(seed)
    table = {}
    for module in "abcde":
        weights = float(torch.randint(1, 6, (1,), generator=random))
        loss = torch.rand(3, generator=random).sort(descending=True).values.tolist()
        table[module] = [
            Choice(name, bits * weights, lost)
            for name, bits, lost in zip(NAMES, (4, 4.5, 8), loss, strict=True)
        ]
    return table


def totals(table: dict[str, list[Choice]], found: dict[str, str]) -> tuple[float, float]:
    chosen = [next(c for c in table[m] if c.name == name) for m, name in found.items()]
    return sum(c.bits for c in chosen), sum(c.loss for c in chosen)


@pytest.mark.parametrize("seed", range(10))
def test_near_the_best_of_all_combinations(seed: int) -> None:
    table = random_table(seed)
    least = sum(choices[0].bits for choices in table.values())
    every = [
        (sum(c.bits for c in pick), sum(c.loss for c in pick))
        for pick in itertools.product(*table.values())
    ]
    largest_step = max(a.loss - b.loss for c in table.values() for a in c for b in c)
    for share in (1.0, 1.1, 1.3, 1.6, 2.0):
        bits, loss = totals(table, within_bits(table, share * least))
        assert bits <= share * least * (1 + 1e-12)
        best = min(lost for used, lost in every if used <= share * least * (1 + 1e-12))
        assert best <= loss + 1e-12 <= best + largest_step + 1e-9
        bits, again = totals(table, within_loss(table, loss))
        assert again <= loss


def test_ends_of_the_budget() -> None:
    table = random_table(3)
    least = sum(choices[0].bits for choices in table.values())
    assert set(within_bits(table, least).values()) == {"small"}
    assert set(within_bits(table, 100 * least).values()) == {"large"}
    with pytest.raises(ConfigError, match="the budget is"):
        within_bits(table, 0.99 * least)
    with pytest.raises(ConfigError, match="best schemes given lose"):
        within_loss(table, 1e-9)
    with pytest.raises(ConfigError, match="no scheme"):
        within_bits({"a": []}, 1)


def test_what_costs_more_and_gains_nothing_is_never_taken() -> None:
    table = {"a": [Choice("small", 4, 1.0), Choice("worse", 5, 1.5), Choice("large", 8, 0.5)]}
    assert within_bits(table, 7) == {"a": "small"}
    assert within_bits(table, 8) == {"a": "large"}

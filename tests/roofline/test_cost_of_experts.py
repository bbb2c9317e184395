"""The floor of a mixture of experts: those that any token chose are read, all that do are used."""

from __future__ import annotations

import pytest
import torch

from penstock.quant import Dense, WeightFormats, format_of, parse_scheme
from penstock.roofline import StepSize, total

from .shapes import costs, of_experts

D, WIDE, COUNT, CHOSEN = 2048, 768, 128, 8
ATTENTION = (4096 + 2 * 512) * D + D * 4096
EXPERT = 3 * D * WIDE
DENSE = 3 * D * 6144
HEAD = 151936 * D


def test_one_token_reads_what_it_chose() -> None:
    cost = costs(of_experts()).cost(StepSize([1], [100], 1))
    values = 3 * ATTENTION + DENSE + 2 * (COUNT * D + CHOSEN * EXPERT) + HEAD
    assert cost.weight_bytes == 2 * values + 2 * D  # and a row of the embedding
    assert cost.products["bfloat16"] == 2 * values + 3 * 4 * 32 * 128 * 100


@pytest.mark.parametrize("chosen", [16, 100, 256])
def test_many_tokens_read_each_expert_once_and_use_it_as_often_as_it_was_chosen(
    chosen: int,
) -> None:
    model = costs(of_experts())
    least = model.cost(StepSize([1] * 16, [100] * 16, 16))
    size = StepSize([1] * 16, [100] * 16, 16, experts=chosen)
    cost = model.cost(size)
    assert cost.weight_bytes - least.weight_bytes == 2 * EXPERT * (chosen - 2 * CHOSEN)
    assert cost.products == least.products
    one = model.cost(StepSize([1], [100], 1))
    assert cost.flops == 16 * one.flops


@pytest.mark.parametrize("experts", [0, 77])
def test_the_rows_add_up(experts: int) -> None:
    """To the whole step's cost, in a mixture of formats too: router and head are others'."""
    formats = WeightFormats(format_of(parse_scheme("w4a8-g32")), Dense(torch.bfloat16))
    model = costs(of_experts(), formats)
    size = StepSize([3, 1, 40], [60, 33, 40], 3, experts=experts)
    rows = {row.op: row for row in model.ops(size)}
    assert total(rows.values()) == model.cost(size)
    assert rows["experts"].calls == 2
    assert rows["norm"].calls == 2 * 2  # before them, and what they add to the residual
    assert rows["up"].calls == rows["down"].calls == 1
    assert rows["experts"].unit == "int4"
    router = 2 * size.tokens * COUNT * D
    assert rows["experts"].products["bfloat16"] == 2 * router

"""A step arrives on the device as it was, and what pads it belongs to nobody."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from penstock.runtime.staging import Staging, StepShape
from penstock.step import ForkedStep, Step

CPU = torch.device("cpu")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged() -> Step:
    """A chunk of three tokens and one that decodes."""
    table = torch.tensor([[4, 0], [7, 9]], dtype=torch.int32)
    return Step(
        tokens=ints(5, 6, 7, 8),
        positions=ints(0, 1, 2, 40),
        slots=ints(128, 129, 130, 296),
        query_start=ints(0, 3, 4),
        context_len=ints(3, 41),
        block_table=table,
        sample_at=ints(2, 3),
    )


def decoding(count: int) -> Step:
    each = torch.arange(count, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32)
    return Step(each + 50, each + 3, each + 90, starts, each + 4, each[:, None] + 1, each)


def same(found: Step, expected: Step) -> bool:
    return all(
        torch.equal(getattr(found, f.name), getattr(expected, f.name)) for f in fields(expected)
    )


@pytest.mark.parametrize("step", [ragged(), decoding(1), decoding(40)], ids=("ragged", "1", "40"))
def test_as_it_was(step: Step) -> None:
    staging = Staging(CPU)
    for _ in range(3):  # buffers take turns
        assert same(staging.send(step), step)


def test_copies() -> None:
    plain = ragged()
    copies = torch.tensor([[0, 77], [2, 78], [1, 79]], dtype=torch.int32)
    step = ForkedStep(*(getattr(plain, f.name) for f in fields(plain)), copies)
    sent = Staging(CPU).send(step)
    assert sent.copies is not None
    assert same(sent, step)


def test_padding_belongs_to_nobody() -> None:
    staging, step = Staging(CPU), decoding(3)
    staging.send(decoding(8), StepShape(8, 8, 4, 8))  # leaves numbers behind
    sent = staging.send(step, StepShape(8, 8, 4, 8))
    assert sent.tokens.tolist() == [50, 51, 52, 0, 0, 0, 0, 0]
    assert sent.slots.tolist() == [90, 91, 92, -1, -1, -1, -1, -1]
    assert sent.query_start.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert sent.context_len.tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert sent.block_table.tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0], *[[0] * 4] * 5]
    assert sent.sample_at.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_addresses_stay() -> None:
    """A graph reads them where they were when it was recorded."""
    shape = StepShape(8, 8, 4, 8)
    staging = Staging(CPU, shape.ends[-1])
    before = staging.address
    places = [staging.send(decoding(n), shape).slots.data_ptr() for n in (1, 8, 3)]
    assert len(set(places)) == 1
    assert staging.address == before
    staging.send(decoding(100))
    assert staging.address != before  # the room was too small


def test_arrays_are_aligned() -> None:
    sent = Staging(CPU).send(decoding(5))
    start = sent.tokens.data_ptr()
    for field in fields(sent):
        assert (getattr(sent, field.name).data_ptr() - start) % 128 == 0

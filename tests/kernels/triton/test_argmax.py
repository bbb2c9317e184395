from __future__ import annotations

import pytest
import torch

from penstock import ops
from penstock.kernels.triton import launchers
from tests.kernels.triton.conftest import DEVICE
from tests.kernels.triton.logits import awkward, normal, same

argmax, reference = launchers()["argmax"], ops.op("argmax").reference


@pytest.mark.parametrize("size", [1, 2, 50, 300, 1025, 5000])
def test_the_first_of_the_largest(size: int) -> None:
    logits = awkward(size)
    for found, expected in zip(argmax(logits), reference(logits), strict=True):
        same(found, expected)
    few = logits[-4:]  # in smaller blocks
    for found, expected in zip(argmax(few), reference(few), strict=True):
        same(found, expected)


def test_rows_lie_anywhere() -> None:
    logits = normal(20, 700)
    part = logits[::2, 13:613]
    for found, expected in zip(argmax(part), reference(part.contiguous()), strict=True):
        same(found, expected)


def test_no_rows() -> None:
    assert [one.shape for one in argmax(torch.empty(0, 64, device=DEVICE))] == [(0,), (0,)]

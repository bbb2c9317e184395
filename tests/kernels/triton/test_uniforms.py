"""The reference is held to published vectors by tests/sampling/test_sampling_philox.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock import ops
from penstock.kernels.triton import launchers
from tests.kernels.triton.conftest import DEVICE
from tests.kernels.triton.logits import same

uniforms, reference = launchers()["uniforms"], ops.op("uniforms").reference


@pytest.mark.parametrize("use", [0, 1, 2, 2**31, 2**32 - 1])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_bit_for_bit(use: int, count: int) -> None:
    random = np.random.default_rng(count)
    seeds = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, count)).to(DEVICE)
    samples = torch.from_numpy(random.integers(0, 2**32, count)).to(DEVICE)
    places = torch.from_numpy(random.integers(0, 2**62, count)).to(DEVICE)
    same(uniforms(seeds, samples, places, use), reference(seeds, samples, places, use))


def test_a_published_vector() -> None:
    """Random123's "philox4x32 10" of a counter and a key of zeros: 6627e8d5 e169c58d …"""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    whole = (0x6627E8D5 >> 5 << 26) | (0xE169C58D >> 6)
    assert uniforms(zero, zero, zero, 0).item() == whole / 2**53

"""Random numbers that are a function of where they are used, not of what was drawn before.

Philox4x32-10 maps a 128-bit counter and a 64-bit key to 128 random bits, without state. With the
seed as the key and (sample, position) as the counter, the number behind a token is the same
whatever else is in the batch, in whatever order, before or after a preemption or a restart.

Source: Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11,
doi:10.1145/2063384.2063405.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.ops.registry import define_op

Words = npt.NDArray[np.uint64]
"""32-bit words in 64-bit arrays, so that a product of two fits."""

_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # golden, sqrt(3)-1
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds of Philox4x32 on N counters at once.

    counter [4, N] and key [2, N] hold 32-bit words; returns [4, N] 32-bit words.
    A round multiplies words 0 and 2, swaps the halves and mixes in words 1, 3 and the key.
    """
    even, odd = counter[0::2], counter[1::2]  # [2, N] each: words 0, 2 and words 1, 3
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _LOW)[::-1]
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def _fake(seeds: Tensor, samples: Tensor, positions: Tensor, use: int) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float64)


@define_op(
    "uniforms(Tensor seeds, Tensor samples, Tensor positions, int use) -> Tensor", fake=_fake
)
def uniforms(seeds: Tensor, samples: Tensor, positions: Tensor, use: int) -> Tensor:
    """One number in [0, 1) for each (seed, sample, position).

    seeds [N] int64, all 64 bits of which count; samples [N] int64 of 32 bits; positions [N] int64
    from 0; use: which of the numbers that belong there, of 32 bits, 0 for the one that draws the
    token; returns [N] float64 with all 53 bits of the mantissa random.
    Cost: some forty multiplications each.
    """
    key, sample, at = (
        given.numpy(force=True).view(np.uint64) for given in (seeds, samples, positions)
    )
    counter = np.stack((at & _LOW, at >> _HALF, sample & _LOW, np.full_like(at, use)))
    words = philox4x32(counter, np.stack((key & _LOW, key >> _HALF)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)  # 27 + 26 bits
    whole = ((high << np.uint64(26)) | low).astype(np.float64)  # exact
    return torch.from_numpy(whole * 2.0**-53).to(seeds.device)

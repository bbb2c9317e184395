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

Words = npt.NDArray[np.uint64]
"""32-bit words in 64-bit arrays, so that a product of two fits."""

_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # golden, sqrt(3)-1
_MASK: Final = 0xFFFFFFFF
_LOW: Final = np.uint64(_MASK)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10
_FEW: Final = 10
"""So many numbers come faster from Python's integers than from arrays."""


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


def uniforms(
    seed: Words, sample_index: Words, position: npt.NDArray[np.int64], use: int = 0
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sample, position).

    seed [N] of 64 bits, sample_index [N] of 32 bits, position [N] of 64 bits; use: which of the
    numbers that belong there, of 32 bits, 0 for the one that draws the token; returns [N] with all
    53 bits of a float64's mantissa random.
    """
    if len(position) <= _FEW:
        rows = zip(seed.tolist(), sample_index.tolist(), position.tolist(), strict=True)
        return np.array([_uniform(*row, use) for row in rows])
    at = position.astype(np.uint64)
    counter = np.stack((at & _LOW, at >> _HALF, sample_index, np.full_like(at, use)))
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _HALF)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)  # 27 + 26 bits
    whole: npt.NDArray[np.float64] = ((high << np.uint64(26)) | low).astype(np.float64)  # exact
    return whole * 2.0**-53


def _uniform(seed: int, sample_index: int, position: int, use: int) -> float:
    """The same for one of each."""
    even0, odd0 = position & _MASK, position >> 32
    even1, odd1 = sample_index, use
    key0, key1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        product0, product1 = even0 * 0xD2511F53, even1 * 0xCD9E8D57
        even0, odd0 = (product1 >> 32) ^ odd0 ^ key0, product1 & _MASK
        even1, odd1 = (product0 >> 32) ^ odd1 ^ key1, product0 & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return float(((even0 >> 5) << 26) | (odd0 >> 6)) * 2.0**-53

"""The random numbers of rows, as arrays: `ops.uniforms`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock import ops
from penstock.ops.uniforms import Words, philox4x32

__all__ = ["Words", "philox4x32", "uniforms"]


def uniforms(
    seed: Words, sample_index: Words, position: npt.NDArray[np.int64], use: int = 0
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sample, position), [N] each; use: which of them."""
    seeds, samples = (torch.from_numpy(words.view(np.int64)) for words in (seed, sample_index))
    found: npt.NDArray[np.float64] = ops.uniforms(
        seeds, samples, torch.from_numpy(position), use
    ).numpy()
    return found

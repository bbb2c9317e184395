"""Weights out of thin air: of a model's shape and nothing else, to measure speed and memory on.

Only config.json is read. vLLM calls it load_format="dummy".
"""

from __future__ import annotations

import math

import torch
from torch import nn

from penstock.models.weights import Progress
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable

STD = 0.02
"""Of the values of matrices; norms scale by 1 and biases are 0."""


def fill_with_noise(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter, one at a time, on `device`: the same seed, the same values there."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, Loadable)}
    expected = [(m, part, shape) for m in modules.values() for part, shape in m.expected().items()]
    total = sum(math.prod(shape) for _, _, shape in expected)
    generator = torch.Generator(device).manual_seed(seed)
    done = 0
    for module, part, shape in expected:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        if isinstance(module, Norm) and part == "weight":
            tensor += 1.0 - module.spec.offset
        elif len(shape) > 1:
            tensor.normal_(0.0, STD, generator=generator)
        module.load(part, tensor)
        done += math.prod(shape)
        if progress is not None:
            progress(done, total)

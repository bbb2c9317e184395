"""Which layers and which neurons a text needs the least.

Layers: each is left out in turn, and the one without which the model stays nearest to itself goes;
then the next, of what is left. Neurons: those whose outputs, times their weights, are small.
Sources: Song et al. 2024, arXiv:2402.09025 (SLEB, by perplexity); Sun et al. 2023, arXiv:2306.11695
(Wanda's measure), An et al. 2023, arXiv:2312.11983 (of whole neurons).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from penstock.nn.linear import Linear
from penstock.pipeline.probe import Probe
from penstock.pipeline.stream import Watched
from penstock.quant import WeightFormat
from penstock.quant.formats.operators import OperatorFormat

NEURONS = 32
"""Neurons that stay are a multiple of so many: groups of weights share scales, kernels panels."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Removed:
    """A layer that goes, and the mean KL from the whole model without it and those before."""

    layer: int
    divergence: float


def choose_layers(probe: Probe, count: int, report: Report) -> list[Removed]:
    """`count` layers in the order in which they go. The probe must have its reference.

    Cost: for each, half a pass over the text for each layer that is left.
    """
    left, found = list(range(probe.num_layers)), list[Removed]()
    trials = sum(len(left) - i for i in range(count))
    done = 0
    for _ in range(count):
        before: list[list[Tensor]] = [[] for _ in probe.steps]

        def keep(step: int, layer: int, residual: Tensor, to: list[list[Tensor]] = before) -> None:
            to[step].append(residual.clone())

        for number in range(len(probe.steps)):
            probe.run(number, left, before=keep)
        losses = []
        for at in range(len(left)):
            rest = left[at + 1 :]
            losses.append(
                probe.divergence(
                    probe.run(number, rest, each[at]) for number, each in enumerate(before)
                )
            )
            done += 1
            report("leaving each layer out", done, trials)
        best = min(range(len(left)), key=losses.__getitem__)
        found.append(Removed(left.pop(best), losses[best]))
    return found


def choose_neurons(probe: Probe, layers: list[int], stay: int, report: Report) -> list[Tensor]:
    """Of each of these layers, the `stay` neurons that are kept, in their order, int64."""
    squares: dict[int, Tensor] = {}
    for i in layers:
        down = probe.decoder.get_submodule(f"layers.{i}.mlp.down")
        assert isinstance(down, Linear) and isinstance(down.weight_format, OperatorFormat)

        def see(x: Tensor, at: int = i) -> None:
            squares[at] = squares.get(at, torch.zeros(())) + x.float().square().sum(0)

        down.weight_format = cast(WeightFormat, Watched(down.weight_format, see))
    for number in range(len(probe.steps)):
        probe.run(number, layers)
        report("watching neurons", number + 1, len(probe.steps))
    found = []
    for i in layers:
        down = probe.decoder.get_submodule(f"layers.{i}.mlp.down")
        assert isinstance(down, Linear) and isinstance(down.weight_format, Watched)
        down.weight_format = cast(WeightFormat, down.weight_format.inner)
        weight = down.weight_format.unpack(down.packed, down.out_features, down.in_features)
        size = squares[i].sqrt() * weight.float().norm(dim=0)
        found.append(size.topk(stay).indices.sort().values)
    return found

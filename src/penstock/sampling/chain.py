"""The draw of rows that ask for more than temperature, top_k, top_p and min_p.

    edited logits
        └─ top_n_sigma → temperature, fixed or dynamic → min_p, top_k → typical_p → top_p
             → epsilon_cutoff → eta_cutoff → xtc, or mirostat instead of all cuts → one draw

Each stage works on what those before it left, and on the rows that ask for it, all at once. What
they cost is passes over the vocabulary, typical_p a sort of it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.ops.draw import draw_from_vocab
from penstock.sampling.params import CUTS, SamplingParams
from penstock.sampling.philox import uniforms
from penstock.sampling.samplers import cutoff, mirostat, top_n_sigma, typical, xtc
from penstock.sampling.samplers.dynamic_temperature import temperatures
from penstock.sampling.state import SequenceSampling
from penstock.sampling.truncation import Cuts, Drawn, cut_top_k_, cut_top_p_, scale_

_XTC_USE = 1
"""Which of the random numbers of a row and position; 0 is the draw's own."""

_OFF = {**CUTS, "dynatemp_range": 0.0, "mirostat": 0}
_OWN = frozenset(_OFF) - {"top_p", "top_k", "min_p"}


def needs_chain(params: SamplingParams) -> bool:
    """Whether a row that samples asks for a stage that the shorter ways don't have."""
    return any(getattr(params, name) != _OFF[name] for name in _OWN)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What some of the rows ask for, and with which parameters, [r, 1] each."""

    rows: list[int]
    values: tuple[Tensor, ...]

    def apply_(self, cut: Callable[..., None], logits: Tensor, *more: Tensor) -> None:
        """Let `cut` change its rows of logits [R, V]; more: further arguments, [R, 1]."""
        if not self.rows:
            return
        part = logits[self.rows]
        cut(part, *self.values, *(x[self.rows] for x in more))
        logits[self.rows] = part


class Chain:
    """The stages of some rows; `rows` may become later ones of the same sequences."""

    def __init__(self, rows: Sequence[SequenceSampling], device: torch.device) -> None:
        self.rows = rows
        self._device = device
        self._sigma = self._stage("top_n_sigma")
        self._dynamic = self._stage("dynatemp_range", "dynatemp_exponent")
        self._typical = self._stage("typical_p")
        self._epsilon = self._stage("epsilon_cutoff")
        self._eta = self._stage("eta_cutoff")
        self._xtc = self._stage("xtc_probability", "xtc_threshold")
        self._mirostat = self._stage("mirostat").rows

    def __call__(self, logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
        """One token of each row. logits [R, V] (overwritten), u [R] in [0, 1)."""
        _, peaks = ops.argmax(logits)
        logits[~peaks.isfinite()] = 0.0  # broken: the peak says so, and no stage meets a NaN
        weights, log2_p = self.weights(logits, cuts)
        tokens = draw_from_vocab(weights, u)
        for i, before in log2_p.items():
            self.rows[i].surprise = -float(before[tokens[i]])
        return tokens, peaks

    def weights(self, logits: Tensor, cuts: Cuts) -> tuple[Tensor, dict[int, Tensor]]:
        """The distribution that each row is drawn from, [R, V]; logits are overwritten.

        Also, for rows with mirostat, log₂-probabilities [V] as they were before it.
        """
        self._sigma.apply_(top_n_sigma.cut_, logits)
        temperature = self._temperature(logits, cuts.temperature)
        cut_top_k_(logits, cuts.top_k)
        scaled = scale_(logits, logits.amax(-1, keepdim=True), temperature)
        scaled.masked_fill_(scaled < cuts.log_min_p, -torch.inf)
        self._typical.apply_(typical.cut_, scaled)
        cut_top_p_(scaled, cuts.top_p)
        self._epsilon.apply_(cutoff.cut_epsilon_, scaled)
        self._eta.apply_(cutoff.cut_eta_, scaled)
        if self._xtc.rows:
            self._xtc.apply_(xtc.cut_, scaled, self._uniforms(_XTC_USE))
        log2_p = {i: self._bound(scaled[i : i + 1], i) for i in self._mirostat}
        return scaled.softmax(-1), log2_p

    def _stage(self, *names: str) -> _Stage:
        """Of the rows for which the first of these parameters isn't off."""
        asking = [
            i for i, row in enumerate(self.rows) if getattr(row.params, names[0]) != _OFF[names[0]]
        ]
        columns = ([getattr(self.rows[i].params, name) for i in asking] for name in names)
        values = (torch.tensor(c, dtype=torch.float32, device=self._device) for c in columns)
        return _Stage(asking, tuple(v[:, None] for v in values))

    def _temperature(self, logits: Tensor, fixed: Tensor) -> Tensor:
        rows = self._dynamic.rows
        if not rows:
            return fixed
        found = fixed.clone()
        found[rows] = temperatures(logits[rows], fixed[rows], *self._dynamic.values)
        return found

    def _uniforms(self, use: int) -> Tensor:
        """A number in [0, 1) for each row, [R, 1] float64."""
        seeds = np.array([row.seed for row in self.rows], dtype=np.uint64)
        samples = np.array([row.sample_index for row in self.rows], dtype=np.uint64)
        positions = np.array([row.num_generated for row in self.rows], dtype=np.int64)
        return torch.from_numpy(uniforms(seeds, samples, positions, use))[:, None].to(self._device)

    def _bound(self, scaled: Tensor, row: int) -> Tensor:
        """Let mirostat cut one row [1, V]; returns the log₂-probabilities before it, [V]."""
        state = self.rows[row]
        return mirostat.cut_(scaled, state.params.mirostat, state.mu)[0]

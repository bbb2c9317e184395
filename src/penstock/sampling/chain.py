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
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.ops.draw import draw_from_vocab
from penstock.sampling.params import CUTS, SamplingParams
from penstock.sampling.philox import uniforms
from penstock.sampling.samplers import cutoff, mirostat, top_n_sigma, typical, xtc
from penstock.sampling.samplers.dynamic_temperature import temperatures
from penstock.sampling.samplers.rows import softmax
from penstock.sampling.state import SequenceSampling
from penstock.sampling.transfer import upload
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
    index: Tensor  # the same on the device
    values: tuple[Tensor, ...]

    def apply_(self, cut: Callable[..., None], logits: Tensor, *more: Tensor) -> None:
        """Let `cut` change its rows of logits [R, V]; more: further arguments, [R, 1]."""
        if not self.rows:
            return
        part = logits.index_select(0, self.index)
        cut(part, *self.values, *(x.index_select(0, self.index) for x in more))
        logits.index_copy_(0, self.index, part)


class Chain:
    """The stages of some rows; `rows` may become later ones of the same sequences.

    on_device: nothing waits for a value of the logits. What mirostat needs of the tokens that were
    drawn is in `surprises` then, [m] float32 for the m rows that `feeding` names.
    """

    def __init__(
        self, rows: Sequence[SequenceSampling], device: torch.device, on_device: bool | None = None
    ) -> None:
        self.rows = rows
        self.ahead = 0  # tokens that the rows have been given and know nothing of
        self.surprises: Tensor | None = None
        self._device = device
        self._on_device = device.type != "cpu" if on_device is None else on_device
        self._sigma = self._stage("top_n_sigma")
        self._dynamic = self._stage("dynatemp_range", "dynatemp_exponent")
        self._top_k = any(row.params.top_k > 0 for row in rows)
        self._top_p = any(row.params.top_p < 1.0 for row in rows)
        self._typical = self._stage("typical_p")
        self._epsilon = self._stage("epsilon_cutoff")
        self._eta = self._stage("eta_cutoff")
        self._xtc = self._stage("xtc_probability", "xtc_threshold")
        self._mirostat = self._stage("mirostat")
        versions = [row.params.mirostat for row in rows]
        self._versions = [
            self._stage_of([i for i, v in enumerate(versions) if v == n]) for n in (1, 2)
        ]

    @property
    def feeding(self) -> list[int]:
        """The rows whose surprise moves a bound."""
        return self._mirostat.rows

    def __call__(self, logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
        """One token of each row. logits [R, V] (overwritten), u [R] in [0, 1)."""
        _, peaks = ops.argmax(logits)
        broken = ~peaks.isfinite()[:, None]
        logits.masked_fill_(broken, 0.0)  # the peak says so, and no stage meets a NaN
        if self._on_device:
            return self._draw_on_device(logits, cuts, u), peaks
        scaled, log2_p = self._scaled(logits, cuts)
        tokens = draw_from_vocab(softmax(scaled), u)
        for i, before in log2_p.items():
            self.rows[i].surprise = -float(before[tokens[i]])
        return tokens, peaks

    def weights(self, logits: Tensor, cuts: Cuts) -> tuple[Tensor, dict[int, Tensor]]:
        """The distribution that each row is drawn from, [R, V]; logits are overwritten.

        Also, for rows with mirostat, log₂-probabilities [V] as they were before it.
        """
        scaled, log2_p = self._scaled(logits, cuts)
        return softmax(scaled), log2_p

    def _scaled(self, logits: Tensor, cuts: Cuts) -> tuple[Tensor, dict[int, Tensor]]:
        """Scaled logits of what is left, and what mirostat needs."""
        scaled = self._cut(logits, cuts)
        return scaled, {i: self._bound(scaled[i : i + 1], i) for i in self._mirostat.rows}

    def _cut(self, logits: Tensor, cuts: Cuts) -> Tensor:
        """Scaled logits of what all stages but mirostat leave."""
        self._sigma.apply_(top_n_sigma.cut_, logits)
        temperature = self._temperature(logits, cuts.temperature)
        if self._top_k:
            cut_top_k_(logits, cuts.top_k)
        scaled = scale_(logits, logits.amax(-1, keepdim=True), temperature)
        scaled.masked_fill_(scaled < cuts.log_min_p, -torch.inf)
        self._typical.apply_(partial(typical.cut_, on_device=self._on_device), scaled)
        if self._top_p:
            cut_top_p_(scaled, cuts.top_p)
        self._epsilon.apply_(cutoff.cut_epsilon_, scaled)
        self._eta.apply_(cutoff.cut_eta_, scaled)
        if self._xtc.rows:
            self._xtc.apply_(xtc.cut_, scaled, self._uniforms(_XTC_USE))
        return scaled

    def _draw_on_device(self, logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
        scaled = self._cut(logits, cuts)
        feeding = self._mirostat
        if feeding.rows:
            before = mirostat.surprises(scaled.index_select(0, feeding.index))
            mu = torch.tensor([[row.mu] for row in self.rows], dtype=torch.float64)
            mu = upload(mu, self._device)
            for stage, cut in zip(self._versions, (mirostat.cut_1_, mirostat.cut_2_), strict=True):
                stage.apply_(cut, scaled, mu)
        # their softmax is what the stages leave
        tokens, _ = ops.draw_plain(scaled, torch.ones_like(cuts.temperature), u)
        if feeding.rows:
            chosen = tokens.index_select(0, feeding.index)[:, None]
            self.surprises = before.gather(1, chosen)[:, 0]
        return tokens

    def _stage(self, *names: str) -> _Stage:
        """Of the rows for which the first of these parameters isn't off."""
        first = names[0]
        asking = [i for i, row in enumerate(self.rows) if getattr(row.params, first) != _OFF[first]]
        return self._stage_of(asking, *names)

    def _stage_of(self, asking: list[int], *names: str) -> _Stage:
        columns = ([getattr(self.rows[i].params, name) for i in asking] for name in names)
        values = (
            upload(torch.tensor(c, dtype=torch.float32)[:, None], self._device) for c in columns
        )
        index = upload(torch.tensor(asking, dtype=torch.int64), self._device)
        return _Stage(asking, index, tuple(values))

    def _temperature(self, logits: Tensor, fixed: Tensor) -> Tensor:
        stage = self._dynamic
        if not stage.rows:
            return fixed
        part, base = logits.index_select(0, stage.index), fixed.index_select(0, stage.index)
        return fixed.index_copy(0, stage.index, temperatures(part, base, *stage.values))

    def _uniforms(self, use: int) -> Tensor:
        """A number in [0, 1) for each row, [R, 1] float64."""
        seeds = np.array([row.seed for row in self.rows], dtype=np.uint64)
        samples = np.array([row.sample_index for row in self.rows], dtype=np.uint64)
        positions = np.array([row.num_generated for row in self.rows], dtype=np.int64) + self.ahead
        found = torch.from_numpy(uniforms(seeds, samples, positions, use))
        return upload(found[:, None], self._device)

    def _bound(self, scaled: Tensor, row: int) -> Tensor:
        """Let mirostat cut one row [1, V]; returns the log₂-probabilities before it, [V]."""
        state = self.rows[row]
        return mirostat.cut_(scaled, state.params.mirostat, state.mu)[0]

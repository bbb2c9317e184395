"""From a batch's logits to its next tokens.

    raw logits ─ log-probabilities (only for rows that ask)
        └─ a caller's own processors                                        processors.py
             ├─ a constraint's mask                                         masks.py
             └─ allowed ids, min_tokens, bias, penalties, DRY               penalties.py
                  ├─ greedy rows: argmax, the lowest id of equals
                  ├─ temperature, min_p, top_k, top_p, one draw             truncation.py
                  └─ rows that ask for more                                 chain.py

Rows are sorted by what they need when a batch is first seen, and the tensors of their parameters
are kept for batches of the same sequences, whatever has been appended or guessed since; a step then
touches only what its rows ask for. Nothing that a row's token depends on depends on the other rows:
every sum runs along one row, and the random number comes from the row's own seed and position.

With logits on a GPU a step has two halves (`Sampler.begin`, `pending.py`). The first only launches:
which way a row takes follows from its parameters (`on_device.py`), never from a value, and what the
host must know is gathered into one copy. The second waits for that copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError
from penstock.sampling import logprobs as report
from penstock.sampling import on_device
from penstock.sampling.chain import Chain, needs_chain
from penstock.sampling.logprobs import TokenLogprobs, collect
from penstock.sampling.masks import Masks
from penstock.sampling.params import SamplingParams
from penstock.sampling.penalties import LogitEdits, gather_edits
from penstock.sampling.pending import MASKED, NO_TOKEN, Done, Launched, Pending, Sampled, failures
from penstock.sampling.processors import ProcessedLogits
from penstock.sampling.samplers.rows import log_softmax
from penstock.sampling.state import SequenceSampling
from penstock.sampling.transfer import Gathered, Part, upload
from penstock.sampling.truncation import (
    NARROW,
    Cuts,
    Drawn,
    draw_full,
    draw_leading,
    draw_nucleus,
    draw_plain,
)

Draw = Callable[[Tensor, Cuts, Tensor], Drawn]

__all__ = ["MASKED", "NO_TOKEN", "Pending", "Sampled", "Sampler"]

_CPU: Final = torch.device("cpu")

_KEPT_PLANS: Final = 20
"""Batches that take turns: of one sequence, drafts of different lengths."""

_DRAWING: Final = 0
"""Which of the random numbers of a row and position draws its token."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn in the same way."""

    draw: Draw
    members: list[int]  # R of them: which rows of the batch they are
    index: Tensor | None  # the same on the device; None = every row, in order
    cuts: Cuts
    seeds: Tensor  # [R] int64
    sample_indices: Tensor  # [R] int64

    def uniforms(self, rows: Sequence[SequenceSampling], ahead: int) -> Tensor:
        """The random number that draws each one's token, [R]."""
        positions = np.array([rows[i].num_generated for i in self.members]) + ahead
        at = upload(torch.from_numpy(positions), self.seeds.device)
        return ops.uniforms(self.seeds, self.sample_indices, at, _DRAWING)


@dataclass(slots=True)
class _Plan:
    """What is the same for all batches of the same sequences; in a step also its rows of them."""

    processed: ProcessedLogits
    edits: LogitEdits | None
    greedy: list[int]  # G of them
    greedy_index: Tensor | None  # the same on the device; None = every row, in order
    groups: list[_Group]
    reported: list[int]  # rows that want log-probabilities
    reported_index: Tensor
    reported_counts: list[int]

    @property
    def takes_largest(self) -> bool:
        """Whether a row's token is its largest logit, and nobody asks for more."""
        edited = bool(self.processed) or self.edits is not None
        return not (edited or self.groups or self.reported)

    def work_on(self, rows: Sequence[SequenceSampling], ahead: int = 0) -> None:
        """These are the rows from here on; without any, nothing holds the last ones."""
        self.processed.rows = rows
        if self.edits is not None:
            self.edits.rows = rows
        for group in self.groups:
            if isinstance(group.draw, Chain):
                group.draw.rows = [rows[i] for i in group.members] if rows else []
                group.draw.ahead = ahead


class Sampler:
    """Chooses the next token of every row of a batch.

    It keeps the plans of the last batches and nothing else: a sequence's own state is in its
    :class:`SequenceSampling`.
    """

    def __init__(self, vocab_size: int, gather: bool = False) -> None:
        """gather: bring what a step has to say to the host at once, and wait for nothing before,
        even where logits are on a CPU; elsewhere that is the only way.
        """
        self.vocab_size = vocab_size
        self._gather = gather
        self._plan: _Plan | None = None  # of the last batch
        self._plans: dict[tuple[object, ...], _Plan] = {}  # by the sequences of its rows
        self.masks = Masks(vocab_size)

    def prepare(self, rows: Sequence[SequenceSampling]) -> None:
        """Begin with what these rows' next tokens need beside logits, in another thread.

        Their constraints are in use until they are sampled.
        """
        self.masks.begin(rows)

    def __call__(self, logits: Tensor, rows: Sequence[SequenceSampling]) -> Sampled:
        """Choose one token per row; ``append`` it to the row's state once it is accepted.

        logits [S, V] float32, which may be overwritten; row i belongs to rows[i]. A row whose
        logits hold a NaN or an infinity, or leave no token, is reported in ``errors``; the others
        go on.
        """
        begun = self._begin(logits, rows, None)
        return begun if isinstance(begun, Sampled) else begun.result()

    def takes_largest(self, rows: Sequence[SequenceSampling]) -> bool:
        """Whether these rows' tokens are their largest logits, which then need not be kept."""
        if self._gather or not rows or any(row.constraint is not None for row in rows):
            return False
        return self._plan_for(rows, _CPU).takes_largest

    def of_largest(self, ids: Tensor, peaks: Tensor) -> Sampled:
        """What such rows get: ids [S] and peaks [S], the places and values of their largest."""
        tokens: list[int] = ids.tolist()
        errors = failures(range(len(tokens)), peaks.tolist())
        for i in errors:
            tokens[i] = NO_TOKEN
        return Sampled(tokens, [None] * len(tokens), errors)

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SequenceSampling],
        *,
        given: Tensor | None = None,
    ) -> Pending:
        """The same in two halves: this one asks a GPU for nothing, and comes back at once.

        Only a caller's own processors are waited for. The logits belong to the sampler until the
        result is there. given: a token [S] of each row, on the logits' device, that its state knows
        nothing of yet; for rows that don't look back at them.
        """
        begun = self._begin(logits, rows, given)
        return Done(begun, logits.device) if isinstance(begun, Sampled) else begun

    def _begin(
        self, logits: Tensor, rows: Sequence[SequenceSampling], given: Tensor | None
    ) -> Launched | Sampled:
        if logits.shape != (len(rows), self.vocab_size):
            raise ConfigError(
                f"The sampler got logits of shape {list(logits.shape)} for {len(rows)} rows and "
                f"a vocabulary of {self.vocab_size}. Pass logits [S, V] and S rows."
            )
        if not rows:
            return self._nothing(logits)
        with torch.inference_mode():
            if logits.dtype is not torch.float32:
                logits = logits.to(torch.float32)
            logits = logits.detach().contiguous()
            if self._gather or not logits.is_cpu:
                return self._launch(logits, rows, given)
            return self._sample(logits, rows, given)

    def _nothing(self, logits: Tensor) -> Launched | Sampled:
        """No tokens; of a GPU, as soon as it has computed what came before: a step takes its time
        without a token, too.
        """
        if logits.is_cpu and not self._gather:
            return Sampled([], [])
        none = logits.new_empty(0, dtype=torch.int32)
        return Launched(none, Gathered([none.new_zeros(1)]), lambda _: Sampled([], []))

    def _edit(
        self,
        plan: _Plan,
        logits: Tensor,
        rows: Sequence[SequenceSampling],
        given: Tensor | None,
    ) -> dict[int, str]:
        """What is done to logits before anything is drawn; by row, what went wrong."""
        errors = plan.processed.apply_(logits) if plan.processed else {}
        if any(row.constraint is not None for row in rows):
            errors = self.masks.apply_(logits, rows) | errors
        if plan.edits is not None:
            plan.edits.apply_(logits, given)
        return errors

    def _sample(
        self, logits: Tensor, rows: Sequence[SequenceSampling], given: Tensor | None
    ) -> Sampled:
        ahead = 0 if given is None else 1
        plan = self._plan_for(rows, logits.device)
        plan.work_on(rows, ahead)
        raw = None
        if plan.reported:
            raw = log_softmax(logits.index_select(0, plan.reported_index))
        tokens = [NO_TOKEN] * len(rows)
        errors = self._edit(plan, logits, rows, given)
        if plan.greedy:
            drawn, peaks = ops.argmax(_select(logits, plan.greedy_index))
            _put(tokens, plan.greedy, drawn)
            errors = failures(plan.greedy, peaks.tolist()) | errors
        for group in plan.groups:
            part = _select(logits, group.index)
            drawn, peaks = group.draw(part, group.cuts, group.uniforms(rows, ahead))
            _put(tokens, group.members, drawn)
            errors = failures(group.members, peaks.tolist()) | errors
        for i in errors:
            tokens[i] = NO_TOKEN
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            self._report(plan, raw, tokens, logprobs)
        plan.work_on(())
        return Sampled(tokens, logprobs, errors)

    def _launch(
        self, logits: Tensor, rows: Sequence[SequenceSampling], given: Tensor | None
    ) -> Launched:
        """`_sample` where all that the host gets to know comes at the end, in one copy."""
        ahead = 0 if given is None else 1
        plan = self._plan_for(rows, logits.device)
        plan.work_on(rows, ahead)
        raw = None
        if plan.reported:
            raw = log_softmax(logits.index_select(0, plan.reported_index))
        errors = self._edit(plan, logits, rows, given)
        tokens = logits.new_empty(len(rows), dtype=torch.int64)
        peaks = logits.new_empty(len(rows))
        fed: list[tuple[SequenceSampling, ...]] = []
        parts: list[Tensor] = []
        if plan.greedy:
            drawn = ops.argmax(_select(logits, plan.greedy_index))
            _put_all(drawn, plan.greedy_index, tokens, peaks)
        for group in plan.groups:
            part = _select(logits, group.index)
            drawn = group.draw(part, group.cuts, group.uniforms(rows, ahead))
            _put_all(drawn, group.index, tokens, peaks)
            if isinstance(group.draw, Chain) and group.draw.surprises is not None:
                fed.append(tuple(rows[group.members[i]] for i in group.draw.feeding))
                parts.append(group.draw.surprises)
        if raw is not None:
            chosen = tokens.index_select(0, plan.reported_index).clamp_(min=0)
            parts += report.gather(raw, chosen, plan.reported_counts)
        plan.work_on(())
        found = tokens.to(torch.int32)
        gathered = Gathered([found, peaks, *parts])

        def read(arrived: list[Part]) -> Sampled:
            for states, surprises in zip(fed, arrived[2:], strict=False):
                for state, surprise in zip(states, surprises.tolist(), strict=True):
                    state.surprise = surprise
            return self._read(plan, arrived[:2] + arrived[2 + len(fed) :], errors)

        return Launched(found.clamp(min=0), gathered, read)

    def _read(self, plan: _Plan, arrived: list[Part], errors: dict[int, str]) -> Sampled:
        """What the host makes of a step's tokens, peaks and log-probabilities."""
        tokens: list[int] = arrived[0].tolist()
        errors = failures(range(len(tokens)), arrived[1].tolist()) | errors
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if plan.reported:
            chosen = [max(tokens[i], 0) for i in plan.reported]
            counts = plan.reported_counts
            found = report.read(arrived[2:], chosen, counts, self.vocab_size)
            for i, entry in zip(plan.reported, found, strict=True):
                logprobs[i] = entry if i not in errors else None
        for i in errors:
            tokens[i] = NO_TOKEN
        return Sampled(tokens, logprobs, errors)

    def _report(
        self,
        plan: _Plan,
        raw: Tensor,
        tokens: list[int],
        logprobs: list[TokenLogprobs | None],
    ) -> None:
        """Fill in the log-probabilities of the rows that asked and have a token."""
        chosen = torch.tensor([max(tokens[i], 0) for i in plan.reported], device=raw.device)
        found = collect(raw, chosen, plan.reported_counts)
        for i, entry in zip(plan.reported, found, strict=True):
            logprobs[i] = entry if tokens[i] != NO_TOKEN else None

    def _plan_for(self, rows: Sequence[SequenceSampling], device: torch.device) -> _Plan:
        # The keys hold what they name, so that an object's address can't come to mean another.
        key = (*[row.kin for row in rows], device)
        plan = self._plans.get(key)
        if plan is None:
            plan = _make_plan(rows, self.vocab_size, device, self._gather or device.type != "cpu")
            if plan.edits is not None and plan.edits.forbidden is not None:
                self._plans.clear()  # flags for whole vocabularies: those of one plan are enough
            while len(self._plans) >= _KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        self._plan = plan
        return plan


def _make_plan(
    rows: Sequence[SequenceSampling], vocab_size: int, device: torch.device, gathers: bool
) -> _Plan:
    greedy = [i for i, row in enumerate(rows) if row.params.is_greedy]
    by_draw: dict[Draw, list[int]] = {}
    for i, row in enumerate(rows):
        if not row.params.is_greedy:
            draw = _draw_for(row.params, vocab_size)
            if gathers:
                draw = on_device.instead_of(draw, row.params.top_k)
            by_draw.setdefault(draw, []).append(i)
    reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    return _Plan(
        processed=ProcessedLogits(rows),
        edits=gather_edits(rows, vocab_size, device, gathers),
        greedy=greedy,
        greedy_index=_index(greedy, len(rows), device),
        groups=[
            _make_group(draw, rows, at, vocab_size, device, gathers) for draw, at in by_draw.items()
        ],
        reported=reported,
        reported_index=upload(torch.tensor(reported, dtype=torch.int64), device),
        reported_counts=[rows[i].params.logprobs or 0 for i in reported],
    )


def _draw_for(params: SamplingParams, vocab_size: int) -> Draw:
    """The cheapest way that serves these parameters."""
    if needs_chain(params):
        return _draw_chain
    if NARROW <= params.top_k < vocab_size:
        return draw_full
    if 0 < params.top_k < vocab_size or params.min_p > 0.0:
        return draw_leading
    return draw_nucleus if params.top_p < 1.0 else draw_plain


def _draw_chain(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Stands for a `Chain`, which each group of rows has its own of."""
    raise AssertionError("a group has its own chain")


def _make_group(
    draw: Draw,
    rows: Sequence[SequenceSampling],
    members: list[int],
    vocab_size: int,
    device: torch.device,
    gathers: bool = False,
) -> _Group:
    params = [rows[i].params for i in members]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype)[:, None], device)

    if draw is _draw_chain:
        draw = Chain([rows[i] for i in members], device, gathers)
    seeds = np.array([rows[i].seed for i in members], dtype=np.uint64)
    return _Group(
        draw=draw,
        members=members,
        index=_index(members, len(rows), device),
        cuts=Cuts(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([min(p.top_k or vocab_size, vocab_size) for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            log_min_p=column(
                [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params],
                torch.float32,
            ),
        ),
        seeds=upload(torch.from_numpy(seeds.view(np.int64)), device),
        sample_indices=upload(torch.tensor([rows[i].sample_index for i in members]), device),
    )


def _index(members: list[int], total: int, device: torch.device) -> Tensor | None:
    return None if len(members) == total else upload(torch.tensor(members), device)


def _select(logits: Tensor, index: Tensor | None) -> Tensor:
    """The indexed rows, copied; all of them as they are."""
    return logits if index is None else logits.index_select(0, index)


def _put(tokens: list[int], members: list[int], drawn: Tensor) -> None:
    """Write the members' tokens to their places."""
    for i, token in zip(members, drawn.tolist(), strict=True):
        tokens[i] = token


def _put_all(drawn: Drawn, index: Tensor | None, tokens: Tensor, peaks: Tensor) -> None:
    """Write the tokens and peaks of the indexed rows to their places, on the device."""
    for places, values in zip((tokens, peaks), drawn, strict=True):
        if index is None:
            places.copy_(values)
        else:
            places.index_copy_(0, index, values)

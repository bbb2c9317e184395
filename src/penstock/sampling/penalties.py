"""Changes to the logits that a request asks for: forbidden tokens, biases and penalties.

Each touches a list of (row, token) pairs, never a dense [S, V] table of counts. What stays the
same from step to step (forbidden sets, biases) is put together once per batch; what grows with
the output is read from arrays that :class:`SequenceSampling` keeps up to date.

Sources: repetition penalty, Keskar et al. 2019 (CTRL), arXiv:1909.05858 §4.1, extended to
negative logits as in Hugging Face transformers; presence and frequency penalties, the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.sampling.state import Counts, Ids, SequenceSampling
from penstock.sampling.transfer import upload


@dataclass(slots=True)
class LogitEdits:
    """The changes that one batch's rows ask for; ``None`` or empty where no row asks."""

    rows: Sequence[SequenceSampling]  # those of this step
    restricted: Tensor | None  # [A] rows with allowed_token_ids
    forbidden: Tensor | None  # [A, V] bool, what those may not use
    biased: Tensor | None  # [N] flat indices row·V + token
    bias: Tensor | None  # [N] float32
    with_minimum: tuple[int, ...]  # rows with min_tokens
    with_bad_words: tuple[int, ...]  # rows with bad_words
    penalised: tuple[int, ...]  # rows with a penalty
    dry: tuple[int, ...]  # rows with dry_multiplier
    strengths: Counts  # [P, 3] repetition, presence, frequency of the penalised rows, [1, 3] if
    # they are the same for all
    on_device: bool  # nothing waits for a value of the logits

    def apply_(self, logits: Tensor, given: Tensor | None = None) -> None:
        """Change logits [S, V] float32, contiguous, in place: masks, bias, penalties, DRY.

        given: a token [S] on the device that each row has been given and doesn't know of yet.
        """
        if self.restricted is not None and self.forbidden is not None:
            part = logits.index_select(0, self.restricted)
            logits[self.restricted] = part.masked_fill_(self.forbidden, -torch.inf)
        if self.with_minimum:
            ahead = 0 if given is None else 1
            below = [i for i in self.with_minimum if self.rows[i].is_below_minimum(ahead)]
            _forbid_(logits, {i: self.rows[i].end_ids for i in below})
        if self.with_bad_words:
            _forbid_(logits, {i: self.rows[i].banned_ids for i in self.with_bad_words})
        if self.biased is not None and self.bias is not None:
            flat = logits.view(-1)
            flat[self.biased] += self.bias
        if self.penalised:
            self._penalise_(logits, given)
        if self.dry:
            self._repel_(logits)

    def _repel_(self, logits: Tensor) -> None:
        """Take off what DRY says."""
        found = [(i, self.rows[i].dry) for i in self.dry]
        lost = [(i, *state.penalties()) for i, state in found if state is not None]
        if not self.on_device:
            for i, ids, values in lost:
                logits[i, torch.from_numpy(ids)] -= torch.from_numpy(values)
            return
        at = np.concatenate([ids + i * logits.shape[1] for i, ids, _ in lost])
        flat, index = logits.view(-1), upload(torch.from_numpy(at), logits.device)
        taken = np.concatenate([values for _, _, values in lost])
        flat[index] -= upload(torch.from_numpy(taken), logits.device)

    def _penalise_(self, logits: Tensor, given: Tensor | None) -> None:
        """repetition: l / r where l > 0 else l · r; presence, frequency: l - p·[c > 0] - f·c.

        Here c counts the token in the output, `given` included; repetition looks at the prompt too.
        """
        rows = [self.rows[i] for i in self.penalised]
        seen = [row.seen_tokens for row in rows]
        starts = [i * logits.shape[1] for i in self.penalised]
        owners = np.repeat(np.arange(len(rows)), [len(ids) for ids in seen])
        at = np.concatenate([ids + start for ids, start in zip(seen, starts, strict=True)])
        counts = np.concatenate([row.seen_counts for row in rows])
        if given is not None:  # one more place a row, which is where `_fill_in_` puts it
            owners = np.concatenate((owners, np.arange(len(rows))))
            at = np.concatenate((at, starts))
            counts = np.concatenate((counts, np.ones(len(rows), dtype=np.float32)))
        if not len(at):
            return
        strengths = self.strengths[owners].T if len(self.strengths) > 1 else self.strengths[0]
        flat = logits.view(-1)
        # Every (row, token) pair occurs once, so the order of the writes doesn't matter.
        if not self.on_device and given is None:
            table = flat.numpy()
            table[at] = _penalised(table[at], counts, *strengths)
            return
        index = upload(torch.from_numpy(at), logits.device)
        columns = torch.from_numpy(np.stack(np.broadcast_arrays(counts, *strengths)))
        count, repetition, presence, frequency = upload(columns, logits.device)
        if given is not None:
            places = upload(torch.tensor(self.penalised), logits.device)
            owner = upload(torch.from_numpy(owners), logits.device)
            _fill_in_(index, count, owner, given.index_select(0, places))
        value = flat[index]
        found = torch.where(value > 0, value / repetition, value * repetition)
        found -= frequency * count
        found -= presence * (count > 0)
        flat[index] = found


def _fill_in_(index: Tensor, count: Tensor, owner: Tensor, given: Tensor) -> None:
    """Count one more token of each row, `given` [P], among places `index` and their counts [N + P].

    The last P places are for them and hold where each row begins. One that was there already is
    there twice then, with the same count. owner [N + P]: whose each place is, 0 … P - 1.
    """
    known = len(index) - len(given)
    index[known:] += given
    again = index[:known] == index[known:].index_select(0, owner[:known])
    count[known:].index_add_(0, owner[:known], count[:known] * again)
    count[:known] += again


def _penalised(
    value: Counts, counts: Counts, repetition: Counts, presence: Counts, frequency: Counts
) -> Counts:
    """What logits become whose tokens the output holds so often; [N], or one strength for all."""
    with np.errstate(over="ignore", invalid="ignore"):  # logits may be as large as floats go
        found = np.where(value > 0, value / repetition, value * repetition)
        found -= frequency * counts
        found -= presence * (counts > 0)
    return found


def _forbid_(logits: Tensor, tokens: dict[int, Ids]) -> None:
    """Make each row's tokens impossible."""
    if not tokens:
        return
    vocab_size = logits.shape[1]
    at = np.concatenate([ids + row * vocab_size for row, ids in tokens.items()])
    logits.view(-1)[upload(torch.from_numpy(at), logits.device)] = -torch.inf


def gather_edits(
    rows: Sequence[SequenceSampling],
    vocab_size: int,
    device: torch.device,
    on_device: bool | None = None,
) -> LogitEdits | None:
    """Put together what ``rows`` ask for; ``None`` if they leave the logits as they are.

    on_device: compute where the logits are, even on a CPU.
    """
    restricted = [i for i, row in enumerate(rows) if row.allowed_ids is not None]
    biased = [i for i, row in enumerate(rows) if len(row.bias_ids)]
    with_minimum = tuple(
        i for i, row in enumerate(rows) if row.params.min_tokens and len(row.end_ids)
    )
    with_bad_words = tuple(i for i, row in enumerate(rows) if row.bad_words)
    penalised = tuple(i for i, row in enumerate(rows) if row.has_penalties)
    dry = tuple(i for i, row in enumerate(rows) if row.dry is not None)
    if not (restricted or biased or with_minimum or with_bad_words or penalised or dry):
        return None
    forbidden = bias_at = bias = None
    if restricted:
        forbidden = torch.ones(len(restricted), vocab_size, dtype=torch.bool)
        for k, i in enumerate(restricted):
            forbidden[k, torch.from_numpy(_present(rows[i].allowed_ids))] = False
        forbidden = upload(forbidden, device)
    if biased:
        at = np.concatenate([rows[i].bias_ids + i * vocab_size for i in biased])
        bias_at = upload(torch.from_numpy(at), device)
        values = np.concatenate([rows[i].bias_values for i in biased])
        bias = upload(torch.from_numpy(values), device)
    strengths = [
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for p in (rows[i].params for i in penalised)
    ]
    if len(set(strengths)) == 1:
        del strengths[1:]
    return LogitEdits(
        rows=rows,
        restricted=upload(torch.tensor(restricted), device) if restricted else None,
        forbidden=forbidden,
        biased=bias_at,
        bias=bias,
        with_minimum=with_minimum,
        with_bad_words=with_bad_words,
        penalised=penalised,
        dry=dry,
        strengths=np.array(strengths, dtype=np.float32).reshape(-1, 3),
        on_device=device.type != "cpu" if on_device is None else on_device,
    )


def _present(ids: Ids | None) -> Ids:
    """No ids for a row that isn't restricted."""
    return np.empty(0, dtype=np.int64) if ids is None else ids

"""From a plan to a `Step`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.request import Sequence, Status
from penstock.engine.scheduler import Part
from penstock.roofline import StepSize
from penstock.step import Step


@dataclass(slots=True)
class Batch:
    """A step, and which rows of its logits belong to whom."""

    step: Step
    size: StepSize
    sampled: list[Sequence]  # those that get a token, forks included
    logit_rows: list[int]  # the row of each, ascending
    prompt_rows: list[tuple[Sequence, int, int]]  # (sequence, first row, count)


def build(parts: list[Part], table: NDArray[np.int32], block_size: int) -> Batch:
    """Lay the parts' tokens out; `table` [max_num_seqs, M] holds the sequences' blocks."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, contexts, rows = [0], [], []
    wanted: list[int] = []  # rows of T whose logits are computed
    sampled: list[Sequence] = []
    logit_rows: list[int] = []
    prompt_rows: list[tuple[Sequence, int, int]] = []
    for sequence, count in parts:
        first = sequence.num_computed
        last = first + count
        if count == 1:
            tokens.append(sequence.tokens[first])
            positions.append(first)
        else:
            tokens += sequence.tokens[first:last]
            positions += range(first, last)
        at = starts[-1]
        starts.append(at + count)
        contexts.append(last)
        rows.append(sequence.row)
        ends = last == len(sequence.tokens)
        if not sequence.num_output and sequence.request.prompt_logprobs is not None:
            prompt_rows.append((sequence, len(wanted), count))
            wanted += range(at, at + count - ends)
        if ends:
            members = [sequence]
            if sequence.index == 0 and not sequence.num_output:
                members += [s for s in sequence.request.sequences if s.status is Status.FORKING]
            sampled += members
            logit_rows += [len(wanted)] * len(members)
            wanted.append(at + count - 1)
    spread = np.array(positions, dtype=np.int32)
    start = np.array(starts, dtype=np.int32)
    owner = np.array(rows)
    of_token = owner if len(owner) == len(spread) else np.repeat(owner, np.diff(start))
    slots = table[of_token, spread // block_size] * np.int32(block_size) + spread % block_size
    width = -(-max(contexts) // block_size)
    step = Step(
        tokens=_ints(tokens),
        positions=torch.from_numpy(spread),
        slots=torch.from_numpy(slots),
        query_start=torch.from_numpy(start),
        context_len=_ints(contexts),
        block_table=torch.from_numpy(table[owner, :width]),
        sample_at=_ints(wanted),
    )
    size = StepSize([count for _, count in parts], contexts, len(wanted))
    return Batch(step, size, sampled, logit_rows, prompt_rows)


def _ints(values: list[int]) -> Tensor:
    """[n] int32, by way of numpy: a third of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(values, dtype=np.int32))

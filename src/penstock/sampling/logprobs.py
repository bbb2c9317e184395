"""Log-probabilities of chosen and of most likely tokens, in the form that vLLM returns.

They are of the model's own distribution: float32 log-softmax of the raw logits, before penalties,
temperature or truncation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError
from penstock.sampling.samplers.rows import log_softmax
from penstock.sampling.transfer import Part


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int  # 1 = the most likely; among equals the lower id comes first
    decoded_token: str | None = None  # filled in by whoever has the tokenizer


TokenLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones, best first."""

Entries = list[TokenLogprobs]

_CANDIDATES: Final = 64
"""Fetched for any k up to 20; a chosen token among them needs no count of those before it."""


def prompt_logprobs(logits: Tensor, next_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """What the model thought of each token of a prompt.

    logits [T, V] any float; next_ids [T], the token that followed each; k, how many of the most
    likely tokens to list beside it (-1 = all). Returns T dicts.
    """
    if logits.dim() != 2 or next_ids.shape != logits.shape[:1]:
        raise ConfigError(
            f"prompt_logprobs takes logits [T, V] and next_ids [T], but got "
            f"{list(logits.shape)} and {list(next_ids.shape)}."
        )
    with torch.inference_mode():
        logprobs = log_softmax(logits.to(torch.float32))
        return collect(logprobs, next_ids.to(logprobs.device, torch.int64), [k] * len(logprobs))


def collect(logprobs: Tensor, chosen: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """The chosen token and the ``counts[i]`` most likely ones (-1 = all) of each row.

    logprobs [L, V] float32; chosen [L] int64. Returns L dicts.
    """
    if not counts:
        return []
    widths = _widths(counts, logprobs.shape[1])
    ids, values = _leading(logprobs, widths)
    own_values: list[float] = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    tokens: list[int] = chosen.tolist()
    ranks = _ranks(logprobs, tokens, own_values, ids, values)
    return [
        _entry(tokens[i], own_values[i], ranks[i], ids[i], values[i], width)
        for i, width in enumerate(widths)
    ]


def _widths(counts: list[int], vocab_size: int) -> list[int]:
    return [vocab_size if count < 0 else min(count, vocab_size) for count in counts]


def _entry(
    token: int, value: float, rank: int, ids: list[int], values: list[float], width: int
) -> TokenLogprobs:
    """A row's chosen token and its first `width` tokens."""
    found = {token: Logprob(value, rank)}
    for place in range(width):
        if values[place] == -torch.inf:  # a token that can't come, and so are all after it
            break
        found.setdefault(ids[place], Logprob(values[place], place + 1))
    return found


def _ranks(
    logprobs: Tensor,
    tokens: list[int],
    own_values: list[float],
    ids: list[list[int]],
    values: list[list[float]],
) -> list[int]:
    """1-based place of each row's token when ordered by value, then id.

    A token that is likelier than the last one fetched is among them, in its place; only for the
    others is the vocabulary counted.
    """
    ranks = [
        ids[i].index(tokens[i]) + 1 if own_values[i] > values[i][-1] else 0
        for i in range(len(tokens))
    ]
    rest = [i for i, rank in enumerate(ranks) if rank == 0]
    if rest:
        part = logprobs[rest]
        own = torch.tensor([[own_values[i]] for i in rest], dtype=part.dtype, device=part.device)
        token = torch.tensor([[tokens[i]] for i in rest], device=part.device)
        column = torch.arange(part.shape[1], device=part.device)
        before = (part > own) | ((part == own) & (column < token))
        for i, count in zip(rest, before.sum(-1).tolist(), strict=True):
            ranks[i] = count + 1
    return ranks


def _leading(logprobs: Tensor, widths: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and values of at least the first ``widths[i]`` tokens of each row by value, then id.

    A row that wants more than are fetched for all is fetched alone.
    """
    values, ids = ops.top_k(logprobs, _CANDIDATES)
    id_rows: list[list[int]] = ids.tolist()
    value_rows: list[list[float]] = values.tolist()
    for i, width in enumerate(widths):
        if width > ids.shape[1]:
            more, at = ops.top_k(logprobs[i : i + 1], width)
            id_rows[i], value_rows[i] = at[0].tolist(), more[0].tolist()
    return id_rows, value_rows


def gather(logprobs: Tensor, chosen: Tensor, counts: list[int]) -> list[Tensor]:
    """What `read` makes the entries of, on the device of logprobs [L, V], float32 and int32.

    chosen [L] int64. The chosen one's value and rank, the leading ids and values of all rows,
    and those of each row that wants more than are fetched for all.
    """
    widths = _widths(counts, logprobs.shape[1])
    own, token = logprobs.gather(1, chosen[:, None]), chosen[:, None]
    column = torch.arange(logprobs.shape[1], device=logprobs.device)
    before = (logprobs > own) | ((logprobs == own) & (column < token))
    parts = [own[:, 0], before.sum(-1, dtype=torch.int32).add_(1)]
    values, ids = ops.top_k(logprobs, max(_common(widths), 1))
    parts += [ids.to(torch.int32), values]
    for i, width in enumerate(widths):
        if width > _CANDIDATES:
            values, ids = ops.top_k(logprobs[i : i + 1], width)
            parts += [ids[0].to(torch.int32), values[0]]
    return parts


def read(parts: list[Part], tokens: list[int], counts: list[int], vocab_size: int) -> Entries:
    """The entries of `gather`'s parts, once they are on the host."""
    own, ranks, *listed = parts
    ids, values = listed[0].tolist(), listed[1].tolist()
    widths, more = _widths(counts, vocab_size), iter(listed[2:])
    for i, width in enumerate(widths):
        if width > _CANDIDATES:
            ids[i], values[i] = next(more).tolist(), next(more).tolist()
    chosen = zip(tokens, own.tolist(), ranks.tolist(), strict=True)
    found = zip(chosen, ids, values, widths, strict=True)
    return [_entry(*one, at, value, width) for one, at, value, width in found]


def _common(widths: list[int]) -> int:
    """How many are fetched for all rows."""
    return max((width for width in widths if width <= _CANDIDATES), default=0)

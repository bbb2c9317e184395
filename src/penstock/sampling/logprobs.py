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


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int  # 1 = the most likely; among equals the lower id comes first
    decoded_token: str | None = None  # filled in by whoever has the tokenizer


TokenLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones, best first."""

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
        logprobs = logits.to(torch.float32).log_softmax(-1)
        return collect(logprobs, next_ids.to(logprobs.device, torch.int64), [k] * len(logprobs))


def collect(logprobs: Tensor, chosen: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """The chosen token and the ``counts[i]`` most likely ones (-1 = all) of each row.

    logprobs [L, V] float32; chosen [L] int64. Returns L dicts.
    """
    if not counts:
        return []
    vocab_size = logprobs.shape[1]
    widths = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    ids, values = _leading(logprobs, widths)
    own_values: list[float] = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    tokens: list[int] = chosen.tolist()
    ranks = _ranks(logprobs, tokens, own_values, ids, values)
    found: list[TokenLogprobs] = []
    for i, width in enumerate(widths):
        entry = {tokens[i]: Logprob(own_values[i], ranks[i])}
        for place in range(width):
            if values[i][place] == -torch.inf:  # a token that can't come, and so are all after it
                break
            entry.setdefault(ids[i][place], Logprob(values[i][place], place + 1))
        found.append(entry)
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

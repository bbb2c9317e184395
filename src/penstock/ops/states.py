"""What operators of layers with states have in common: whose rows are whose, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def ragged(
    query_start: Tensor, context_len: Tensor, states: Tensor | None
) -> Iterator[tuple[int, int, int]]:
    """(first row, the one behind its last, slot of its state or −1) of each sequence that has rows.

    Raises ValueError for one that began earlier and has no state.
    """
    for b in range(context_len.shape[0]):
        first, last = int(query_start[b]), int(query_start[b + 1])
        if first == last:
            continue
        if states is None and int(context_len[b]) != last - first:
            raise ValueError(
                f"Sequence {b} has {int(context_len[b])} tokens, {last - first} of them in this "
                "step, and no state to go on from."
            )
        yield first, last, -1 if states is None else int(states[b])


def slots_by_row(kept: Tensor | None) -> dict[int, list[int]]:
    """The slots that what follows a row goes to; kept [M, 2] or None: rows and slots."""
    found: dict[int, list[int]] = {}
    for row, slot in [] if kept is None else kept.tolist():
        found.setdefault(row, []).append(slot)
    return found

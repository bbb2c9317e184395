"""Logits processors of a caller's own: called for all rows that name them, failing only those.

A processor is a callable `processor(rows, logits)`. rows are the sequences that it works on in
this step, logits [R, V] float32 a copy of theirs, before masks, biases and penalties. It returns
logits of the same shape, or None where it has changed them in place. The same object, named by
several requests, gets all of their rows in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from penstock.errors import InvalidSamplingError, kind_of

if TYPE_CHECKING:
    from penstock.sampling.state import SequenceSampling


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """One sequence, as a processor sees it."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    sample_index: int  # among the n samples of its request


LogitsProcessor = Callable[[Sequence[ProcessorRow], Tensor], Tensor | None]


class ProcessedLogits:
    """The processors of one batch's rows, each object once; `rows` are this step's."""

    def __init__(self, rows: Sequence[SequenceSampling]) -> None:
        self.rows = rows
        self._work: list[tuple[LogitsProcessor, list[int]]] = []
        for i, row in enumerate(rows):
            for processor in cast("tuple[LogitsProcessor, ...]", row.params.logits_processors):
                same = [at for known, at in self._work if known is processor]
                if not same:
                    self._work.append((processor, [i]))
                elif i not in same[0]:
                    same[0].append(i)

    def __bool__(self) -> bool:
        return bool(self._work)

    def apply_(self, logits: Tensor) -> dict[int, str]:
        """Change the rows of logits [S, V]; returns, by row, what a processor did wrong.

        One that raises for several rows is called again for each of them alone.
        """
        errors: dict[int, str] = {}
        for processor, members in self._work:
            whole = [i for i in members if i not in errors]
            if whole and self._call(processor, whole, logits) is not None:
                for i in whole:
                    if (error := self._call(processor, [i], logits)) is not None:
                        errors[i] = error
        return errors

    def _call(self, processor: LogitsProcessor, members: list[int], logits: Tensor) -> str | None:
        """Call it and take its logits over; returns what went wrong."""
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        part = logits[members]
        try:
            found = processor([self.rows[i].seen() for i in members], part)
        except Exception as error:  # whatever a caller's code raises is its request's own failure
            return f"The logits processor {name} raised {type(error).__name__}: {error}"
        if found is None:
            found = part
        if not isinstance(found, Tensor) or found.shape != part.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            return f"The logits processor {name} returned {shape} instead of {list(part.shape)}."
        found = found.to(torch.float32)
        if bool((found.isnan() | (found == torch.inf)).any()):
            return f"The logits processor {name} returned NaN or +infinity."
        logits[members] = found
        return None


def processors(value: object) -> tuple[LogitsProcessor, ...]:
    """`logits_processors` as a tuple. Raises InvalidSamplingError for what can't be called."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidSamplingError(
            f"logits_processors is {value!r:.60}, {kind_of(value)}. Pass a list of "
            "callables (rows, logits) -> logits."
        )
    for i, one in enumerate(value):
        if not callable(one):
            raise InvalidSamplingError(
                f"logits_processors[{i}] is {one!r:.60}, {kind_of(one)}, which can't be "
                "called. Pass callables (rows, logits) -> logits."
            )
    return tuple(value)

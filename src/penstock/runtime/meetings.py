"""How much of a meeting's two places (`ops.ranks`) a step's rows take."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.runtime.plan import Operator, Weight
from penstock.runtime.program import Program

_FLOAT32_BYTES = 4


def met_bytes(program: Program, tokens: int, rows: int, itemsize: int, place_bytes: int) -> int:
    """Of both places together, after steps of up to so many tokens and sampled rows.

    itemsize: of activations. Places are used in turns, and only as far as rows reach.
    """
    used, turn = [0, 0], 0
    for _ in range(2):  # after an odd number of meetings the next step's are the other way round
        for operator in program.plan.operators:
            for size in _meetings(program, operator, tokens, rows, itemsize, place_bytes):
                used[turn] = max(used[turn], size)
                turn = 1 - turn
    return sum(used)


def _meetings(
    program: Program, operator: Operator, tokens: int, rows: int, itemsize: int, place_bytes: int
) -> Iterator[int]:
    """Bytes of each of an operator's, in their order."""
    if operator.shape is None:
        return
    columns = int(operator.shape[-1])
    if operator.op in ("gather_columns", "gather_embedding"):
        of_tokens = operator.shape[0] == "T"
        width = columns * (itemsize if of_tokens else _FLOAT32_BYTES)  # logits
        yield from _in_rounds(tokens if of_tokens else rows, [width], place_bytes)
    elif operator.op == "experts" and operator.arguments["meeting"] is not None:
        chosen, hidden = operator.arguments["k"], operator.arguments["up_bounds"]
        assert isinstance(chosen, int)
        widths = [chosen * columns]  # of whole experts: each choice's products
        if isinstance(hidden, Weight):
            widths = [chosen * int(program.fixed(hidden)[-1]), columns]
        yield from _in_rounds(tokens, [x * itemsize for x in widths], place_bytes)


def _in_rounds(rows: int, widths: list[int], place_bytes: int) -> Iterator[int]:
    """Bytes of meetings of so many rows, one of each width (bytes) for as many rows at a time as a
    place has room for."""
    most = max(place_bytes // max(widths), 1)
    for first in range(0, rows, most):
        for width in widths:
            yield min(rows - first, most) * width

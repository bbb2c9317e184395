"""Operators of rows that other packages bring along: a name, a reference, and perhaps C.

What stands in a plan is the name; what runs for it is what the process has registered under it. The
C function has the type `penstock_rows` (`include/penstock_rows.h`).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import KernelError, nearest
from penstock.ops.registry import NAMESPACE, define_op

Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowOperator:
    """What is registered under a name."""

    name: str
    reference: Rows
    columns: Callable[[int], int]
    library: ctypes.CDLL | None  # kept, so that the function stays
    address: int  # of the C function; 0: there is none


_known: dict[str, RowOperator] = {}


def define_row_operator(
    name: str,
    reference: Rows,
    *,
    columns: Callable[[int], int] = lambda columns: columns,
    library: str | Path | None = None,
    symbol: str | None = None,
) -> None:
    """Register an operator y = f(x) of rows: x [T, N] float32 or bfloat16, y [T, columns(N)] alike.

    reference: the same in torch, for any device; a row's result may depend on that row alone, or it
    changes with the batch. library, symbol: a shared library and its function of type
    `penstock_rows`, by which CPUs compute it, in programs too; its results must be the reference's.
    A name is registered once; again with the same function it is left as it is. Raises KernelError
    for a name that is taken, or a library without that function.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise KernelError(f"A row operator's name must be like relu2 or my_gate, not {name!r}.")
    if (library is None) != (symbol is None):
        raise KernelError(f"{name}: a library has a symbol in it, and a symbol lies in a library.")
    held, address = None, 0
    if library is not None and symbol is not None:
        try:
            held = ctypes.CDLL(str(library))
            found = ctypes.cast(getattr(held, symbol), ctypes.c_void_p).value
        except (OSError, AttributeError) as error:
            said = str(error).rstrip(".")
            raise KernelError(f"The row operator {name} has no C function: {said}.") from error
        address = found or 0
    before = _known.get(name)
    if before is not None and (before.reference, before.address) != (reference, address):
        raise KernelError(f"There is a row operator {name} already, which does something else.")
    _known[name] = before or RowOperator(name, reference, columns, held, address)


def row_operator(name: str) -> RowOperator:
    """What is registered as `name`. Raises KernelError where nothing is."""
    if name not in _known:
        raise KernelError(
            f"There is no row operator {name!r} here.{nearest(name, _known)} The package that "
            "brings it isn't installed, or PENSTOCK_PLUGINS leaves it out."
        )
    return _known[name]


def _fake_rows(x: Tensor, operator: str, out_columns: int) -> Tensor:
    return x.new_empty((x.shape[0], out_columns))


def _reference(x: Tensor, operator: str, out_columns: int) -> Tensor:
    found = row_operator(operator).reference(x).to(x.dtype)
    if found.shape != (x.shape[0], out_columns):
        raise KernelError(
            f"The row operator {operator} gives {list(found.shape)} of {list(x.shape)}, but said "
            f"that it has {out_columns} columns."
        )
    return found


@define_op("foreign_rows(Tensor x, str operator, SymInt out_columns) -> Tensor", fake=_fake_rows)
def foreign_rows(x: Tensor, operator: str, out_columns: int) -> Tensor:
    """y [T, out_columns] in x.dtype, of x [T, N], as the operator of this name has it.

    By its C function where there is one, x is a CPU's, and Penstock's library is loaded.
    """
    address = row_operator(operator).address
    native = getattr(torch.ops, NAMESPACE)
    if address and x.device.type == "cpu" and hasattr(native, "run_foreign_rows"):
        found: Tensor = native.run_foreign_rows(x.contiguous(), address, out_columns)
        return found
    return _reference(x, operator, out_columns)

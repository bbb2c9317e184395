"""A decoder as one native call: its operators are noted once, then run without Python between them.

What a graph is to a GPU, for the CPU: the decoder runs once with nothing computed, and every
operator it calls becomes part of a plan (`runtime.plan`), or a plan comes out of an engine folder.
Its operators are handed to the native library with their weights and caches, and from then on a
step is one call. Activations live in buffers that are kept, and other Python threads run meanwhile.
The kernels are those that eager calls run, so the bits are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cache import block_rows, copy_blocks
from penstock.errors import KernelError
from penstock.ops import row_operator
from penstock.ops.linear import ROW_CODES
from penstock.ops.registry import NAMESPACE
from penstock.runtime.plan import (
    Array,
    Cache,
    Operator,
    Plan,
    Value,
    Weight,
    fixed_tensors,
    not_built,
    record,
)
from penstock.step import KV, RingStep, Step

KEPT_ROWS = 256
"""Memory for logits is kept for up to this many rows: prompts' log-probabilities need far more."""

MOST_TOKENS = (1 << 31) - 1
"""Of a step, whose arrays are int32."""

_ARRAYS = {
    "tokens": "[T]",
    "positions": "[T]",
    "slots": "[T]",
    "query_start": "[B + 1]",
    "context_len": "[B]",
    "block_table": "[B, M]",
    "sample_at": "[S]",
    "adapters": "[T]",
    "all_positions": "[T]",
    "rows": "[R + 1]",
    "states": "[B]",
    "kept": "[N, 2]",
}

_native = getattr(torch.ops, NAMESPACE)


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """How `linear` goes over a matrix: csrc/cpu/kernels.h. 0: as without a choice.

    No choice changes a bit of the result; which is fastest depends on machine, shape and rows.
    Raises ValueError for numbers that mean nothing.
    """

    part_bytes: int = 0  # of weights that a thread takes at a time, at least
    rows_bytes: int = 0  # of rows that it takes through all of those before the next rows
    widen_rows: int = 0  # more rows: a panel is widened once, not for a few rows at a time
    pair_rows: int = 0  # from so many rows on that pass twice, two panels of integers at a time
    ahead_bytes: int = 0  # how far ahead of what rows that pass once read memory is asked for
    ahead_cache: int = 0  # into which cache: 1, 2, or 3 to leave it to the processor

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), 3 if field.name == "ahead_cache" else 1 << 30
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"{field.name}={value!r} isn't a number from 0 to {most:,}")


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of a program."""

    name: str  # `penstock.linear`
    constants: tuple[Tensor, ...]  # weights and caches
    shapes: str  # of its tensors; T tokens, S sampled rows, B sequences, M blocks


class Program:
    """`Forward` of one decoder over one cache, in one native call.

    Its logits are good until the next step: they are overwritten then. A program is one thread's;
    a second one that calls it meanwhile gets a RuntimeError.
    """

    def __init__(self, decoder: nn.Module, kv: KV, *, adapted: bool = False) -> None:
        """adapted: of steps with adapters, others run too. Raises KernelError when the decoder
        calls an operator that no program can hold.
        """
        self._make(*record(decoder, kv, fixed_tensors(decoder), adapted=adapted), kv)

    @classmethod
    def of_plan(cls, plan: Plan, tensors: Mapping[str, Tensor], kv: KV) -> Program:
        """The program of a plan that was recorded before, over these weights; nothing is traced.

        Raises KernelError for a weight, a cache or an operator that isn't there.
        """
        made = cls.__new__(cls)
        made._make(plan, tensors, kv)
        return made

    def _make(self, plan: Plan, tensors: Mapping[str, Tensor], kv: KV) -> None:
        self.plan = plan
        self._tensors = tensors
        self._kv = kv
        handle = _native.program_new()
        self._free = weakref.finalize(self, _native.program_free, handle)
        self._handle: int = handle
        values: list[int] = []
        for operator in plan.operators:
            value = self._emit(operator, values)
            if operator.shape is not None:
                values.append(value)
        _native.program_finish(handle, values[plan.output])
        columns = [o.shape for o in plan.operators if o.shape is not None][plan.output][1]
        self._logits = torch.empty((0, int(columns)))
        self._largest = torch.empty((0, 2), dtype=torch.int64)

    def _emit(self, operator: Operator, values: Sequence[int]) -> Any:
        """Hand one operator to the native library; what it gives its result's number."""
        if operator.takes_rows:
            source = operator.arguments["weight"]
            assert isinstance(source, Value)
            return _native.program_sampled_rows(self._handle, values[source.number])
        native: list[Any] = []
        for name, argument in operator.arguments.items():
            if name == "copies":  # of a step, as its arrays
                continue
            if isinstance(argument, Value):
                native.append(values[argument.number])
            elif isinstance(argument, Array):
                if operator.op == "embedding":
                    native.append(("tokens", "positions").index(argument.name))
            else:
                native.append(self.fixed(argument))
        if operator.op == "foreign_rows":  # by name in the plan, by address in a process
            native[1] = _address(str(native[1]))
        emit = getattr(_native, f"program_{operator.op}", None)
        if emit is None:
            raise not_built(operator.op)
        return emit(self._handle, *native)

    def fixed(self, argument: Any) -> Any:
        """The tensor that a weight or a cache stands for; a literal itself."""
        if isinstance(argument, Weight):
            if argument.name not in self._tensors:
                raise KernelError(f"The plan reads {argument.name}, which isn't there.")
            return self._tensors[argument.name]
        if isinstance(argument, Cache):
            try:
                return self._kv[argument.layer][argument.part]
            except IndexError as error:
                raise KernelError(
                    f"The plan reads part {argument.part} of layer {argument.layer}'s cache, "
                    f"which this cache of {len(self._kv)} layers doesn't have."
                ) from error
        return argument

    @cached_property
    def calls(self) -> list[Call]:
        """Its operators, with what they read."""
        shapes = [o.shape for o in self.plan.operators if o.shape is not None]
        return [self._call(o, shapes) for o in self.plan.operators]

    def _call(self, operator: Operator, shapes: Sequence[tuple[str | int, ...]]) -> Call:
        constants: list[Tensor] = []
        described: list[str] = []
        for argument in operator.arguments.values():
            if isinstance(argument, Weight | Cache):
                tensor = self.fixed(argument)
                constants.append(tensor)
                described.append(str(list(tensor.shape)))
            elif isinstance(argument, Value):
                described.append(str(list(shapes[argument.number])).replace("'", ""))
            elif isinstance(argument, Array):
                described.append(_ARRAYS[argument.name])
        return Call(f"{NAMESPACE}.{operator.op}", tuple(constants), " ".join(described))

    def reserve(self, tokens: int, rows: int) -> int:
        """Take the memory that steps of up to `tokens` tokens and `rows` sampled rows need.

        One set of buffers serves prompts and decoding alike. Returns the bytes of all, the
        logits' included; steps within the limits then allocate nothing.
        """
        self._room(min(rows, KEPT_ROWS))
        return int(_native.program_reserve(self._handle, tokens)) + self._logits.nbytes

    def touched(self, tokens: int, rows: int) -> int:
        """Of what `reserve` takes, the bytes that such steps write to, the logits' included."""
        logits = min(rows, KEPT_ROWS) * self._logits.shape[1] * self._logits.itemsize
        return int(_native.program_touched(self._handle, tokens, rows)) + logits

    @property
    def workspace_bytes(self) -> int:
        """What its buffers hold now, the kept logits included."""
        return int(_native.program_reserve(self._handle, 0)) + self._logits.nbytes

    def use_threads(self, table: Sequence[tuple[int, int]]) -> None:
        """(tokens, threads): steps of up to so many tokens run on so many threads, the first entry
        that fits; larger ones on all. Never on more than torch.get_num_threads().
        """
        entries = torch.tensor(table, dtype=torch.int32).reshape(-1, 2)
        _native.program_threads(self._handle, entries)

    @cached_property
    def products(self) -> dict[str, list[int]]:
        """The operators that multiply by a matrix, by its form: those alike are equally fast."""
        found: dict[str, list[int]] = {}
        for number, operator in enumerate(self.plan.operators):
            if operator.op in ("linear", "linear_add_"):
                found.setdefault(self._product(operator), []).append(number)
        return found

    def _product(self, operator: Operator) -> str:
        """`linear int8[72, 224, 16, 4] scale float32[72, 1, 16] of int8 rows`."""
        said = [operator.op]
        for name in ("weight", "scale", "zero"):
            argument = operator.arguments[name]
            if argument is not None:
                tensor = self.fixed(argument)
                dtype = str(tensor.dtype).removeprefix("torch.")
                said.append(f"{'' if name == 'weight' else name + ' '}{dtype}{list(tensor.shape)}")
        rows = ROW_CODES[int(operator.arguments["row_codes"])]  # type: ignore[arg-type]
        return " ".join([*said, *[f"of {rows} rows"] * (rows != "none")])

    def use_variants(self, table: Sequence[tuple[str, int, LinearVariant]]) -> None:
        """(product, rows, how): calls with up to so many rows go so, those with more as the last.

        Replaces earlier choices. Raises KernelError for a product that isn't one of `products`.
        """
        entries: list[tuple[int, ...]] = []
        for product, rows, variant in sorted(table, key=lambda entry: entry[1]):
            if product not in self.products:
                raise KernelError(f"A variant is chosen for {product!r}, which isn't in the plan.")
            how = astuple(variant)
            entries += [(number, rows, *how) for number in self.products[product]]
        chosen = torch.tensor(entries, dtype=torch.int32).reshape(
            -1, 2 + len(fields(LinearVariant))
        )
        _native.program_variants(self._handle, chosen)

    def __call__(self, step: Step, kv: KV, times: Tensor | None = None) -> Tensor:
        """Logits [S, V] float32 of the rows `step.sample_at`.

        times [len(calls) + 1] float64, for whoever asks: seconds of `time.perf_counter` before each
        operator and after the last.
        """
        logits = self._room(step.sample_at.shape[0])
        self._run(step, kv, logits, times)
        return logits

    @cached_property
    def _has_experts(self) -> bool:
        return any(operator.op == "experts" for operator in self.plan.operators)

    @property
    def experts_used(self) -> int:
        """The experts that any token of the last step chose, of all layers together."""
        return int(_native.program_experts_used(self._handle)) if self._has_experts else 0

    @cached_property
    def finds_largest(self) -> bool:
        """Whether `largest` can be asked for: logits are what a product and a soft cap leave."""
        return bool(_native.program_finds_largest(self._handle))

    def largest(self, step: Step, kv: KV) -> tuple[Tensor, Tensor]:
        """`ops.argmax` of the step's logits, which nobody gets: places [S] int64, values [S].

        They are looked through where they are made, in a core's own cache. Of many rows they would
        be more bytes than the matrix that makes them: 64 rows of 151,936 are 39 MB.
        """
        count = step.sample_at.shape[0]
        if len(self._largest) < count:
            self._largest = torch.empty((count, 2), dtype=torch.int64)
        found = self._largest[:count]  # csrc/cpu/kernels.h: a float, padding, a column
        self._run(step, kv, found, None)
        return found[:, 1], found.view(torch.float32)[:, 0]

    def _run(self, step: Step, kv: KV, out: Tensor, times: Tensor | None) -> None:
        if kv is not self._kv:
            raise KernelError("A program runs over the cache that it was made for.")
        shared = step if isinstance(step, RingStep) else None
        _native.program_run(
            self._handle,
            step.tokens,
            step.positions,
            step.slots,
            step.query_start,
            step.context_len,
            step.block_table,
            step.sample_at,
            step.copies,
            step.adapters,
            None if shared is None else shared.all_positions,
            None if shared is None else shared.rows,
            step.states,
            step.kept,
            out,
            times,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`cache.copy_blocks` of its cache, in one call where no block is both read and written."""
        if {a for a, _ in pairs} & {b for _, b in pairs}:
            copy_blocks(block_rows(self._kv), pairs)
        else:
            blocks = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
            _native.program_copy_blocks(self._handle, blocks)

    def _room(self, rows: int) -> Tensor:
        if rows > KEPT_ROWS:
            return torch.empty((rows, self._logits.shape[1]))
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self._logits.shape[1]))
        return self._logits[:rows]


def _address(name: str) -> int:
    """Of a row operator's C function. Raises KernelError where it has none."""
    found = row_operator(name).address
    if not found:
        raise KernelError(
            f"The row operator {name} has no C function, so it can't be part of a program. Set "
            "enforce_eager=True to call the operators of this decoder one by one."
        )
    return found

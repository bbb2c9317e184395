"""A decoder as one native call: its operators are noted once, then run without Python between them.

What a graph is to a GPU, for the CPU: the decoder runs once with nothing computed, every operator
it calls is handed to the native library with its weights and caches, and from then on a step is one
call. Activations live in buffers that are kept, and other Python threads run meanwhile. The kernels
are those that eager calls run, so the bits are the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ops
from penstock.errors import KernelError
from penstock.ops.registry import NAMESPACE
from penstock.step import KV, Step

KEPT_ROWS = 256
"""Memory for logits is kept for up to this many rows: prompts' log-probabilities need far more."""

_native = getattr(torch.ops, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of a program."""

    name: str  # `penstock.linear`
    constants: tuple[Tensor, ...]  # weights and caches
    shapes: str  # of its tensors; T tokens, S sampled rows


class _Recorder(TorchDispatchMode):
    """Builds a native program of the operators that are called, instead of computing them."""

    def __init__(self, program: int, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = program
        self.calls: list[Call] = []
        self._arrays = {id(getattr(step, f.name)): f.name for f in fields(step)}
        self._values: dict[int, int] = {}
        self._rows: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that an id stays that of one tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its compiler, for a second and more, at the first call."""
        return False

    def value(self, tensor: Tensor) -> int:
        """The program's number for what an operator returned."""
        return self._values[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        space, _, op = name.partition("::")
        if op == "program_free":  # of another that the garbage collector found meanwhile
            return func(*args)
        if space != NAMESPACE:
            raise KernelError(
                f"{name} isn't one of Penstock's operators, so it can't be part of a program. Set "
                "enforce_eager=True to call the operators of this decoder one by one."
            )
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        complete = {a.name: given.get(a.name, a.default_value) for a in func._schema.arguments}
        self.calls.append(self._call(op, complete))
        value = self._emit(op, complete)
        output = ops.op(op).fake(**complete)
        if output is not None:
            self._values[id(output)] = value
            rows = [self._rows[id(a)] for a in complete.values() if id(a) in self._rows]
            self._rows[id(output)] = "S" if self._takes_rows(op, complete) else [*rows, "T"][0]
            self._alive.append(output)
        return output

    def _takes_rows(self, op: str, arguments: dict[str, Any]) -> bool:
        return op == "embedding" and id(arguments["weight"]) in self._values

    def _call(self, op: str, arguments: dict[str, Any]) -> Call:
        tensors = [a for a in arguments.values() if isinstance(a, Tensor)]
        fixed = [t for t in tensors if id(t) not in self._values and id(t) not in self._arrays]
        return Call(f"{NAMESPACE}.{op}", tuple(fixed), " ".join(map(self._shape, tensors)))

    def _shape(self, tensor: Tensor) -> str:
        if id(tensor) not in self._values:
            return str(list(tensor.shape))
        return str([self._rows[id(tensor)], *tensor.shape[1:]]).replace("'", "")

    def _emit(self, op: str, arguments: dict[str, Any]) -> Any:
        if self._takes_rows(op, arguments):
            if self._arrays.get(id(arguments["tokens"])) != "sample_at":
                raise KernelError("Only the sampled rows of a value can be taken.")
            return _native.program_sampled_rows(self.program, self.value(arguments["weight"]))
        native = []
        for name, argument in arguments.items():
            array = self._arrays.get(id(argument))
            if array is None:
                native.append(self._values.get(id(argument), argument))
            elif op == "embedding":
                native.append(("tokens", "positions").index(array))
            elif array != name:
                raise KernelError(f"{op} takes the step's {array} as its {name}.")
        if not hasattr(_native, f"program_{op}"):
            raise KernelError(
                f"{op} can't be part of a program. Set enforce_eager=True to call the operators of "
                "this decoder one by one."
            )
        return getattr(_native, f"program_{op}")(self.program, *native)


class Program:
    """`Forward` of one decoder over one cache, in one native call.

    Its logits are good until the next step: they are overwritten then. A program is one thread's;
    a second one that calls it meanwhile gets a RuntimeError.
    """

    def __init__(self, decoder: nn.Module, kv: KV) -> None:
        """Raises KernelError when the decoder calls an operator that no program can hold."""
        handle = _native.program_new()
        self._free = weakref.finalize(self, _native.program_free, handle)
        self._handle: int = handle
        self._kv = kv
        step = _blank_step()
        with torch.inference_mode(), _Recorder(handle, step) as recorder:
            output = decoder(step, kv)
        self.calls = recorder.calls
        self._logits = torch.empty((0, output.shape[1]))
        _native.program_finish(handle, recorder.value(output))

    def __call__(self, step: Step, kv: KV, times: Tensor | None = None) -> Tensor:
        """Logits [S, V] float32 of the rows `step.sample_at`.

        times [len(calls) + 1] float64, for whoever asks: seconds of `time.perf_counter` before each
        operator and after the last.
        """
        if kv is not self._kv:
            raise KernelError("A program runs over the cache that it was made for.")
        logits = self._room(step.sample_at.shape[0])
        _native.program_run(
            self._handle,
            step.tokens,
            step.positions,
            step.slots,
            step.query_start,
            step.context_len,
            step.block_table,
            step.sample_at,
            logits,
            times,
        )
        return logits

    def _room(self, rows: int) -> Tensor:
        if rows > KEPT_ROWS:
            return torch.empty((rows, self._logits.shape[1]))
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self._logits.shape[1]))
        return self._logits[:rows]


def _blank_step() -> Step:
    """A step whose arrays are known by what they are; nothing of them is read."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return Step(ints(2), ints(2), ints(2), ints(3), ints(2), ints(2, 2), ints(2))

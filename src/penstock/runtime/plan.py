"""The operators of a step as data: recorded once, kept in a file, made into a program anywhere.

A plan names what it works on: weights by their parameter's name, caches by layer and part, the
step's arrays, and what earlier operators returned. Everything else is a literal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ops
from penstock.cache import holds_states
from penstock.errors import KernelError
from penstock.ops.registry import NAMESPACE
from penstock.runtime import compile_counter
from penstock.step import KV, AdaptedStatefulStep, AdaptedStep, RingStep, StatefulStep, Step

PLAN_VERSION = 2
"""Of the form of a plan and the meaning of its operators' arguments."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is the same in every step."""

    name: str  # `layers.0.mlp.up.scale`


@dataclass(frozen=True, slots=True)
class Cache:
    """A part of one layer's cache: keys, values, and the scales of both."""

    layer: int
    part: int


@dataclass(frozen=True, slots=True)
class Array:
    """One of the step's arrays."""

    name: str  # a field of Step


@dataclass(frozen=True, slots=True)
class Value:
    """What an earlier operator returned, numbered from 0."""

    number: int


Argument = None | bool | int | float | str | torch.dtype | Weight | Cache | Array | Value

_REFERENCES: dict[str, Any] = {
    "weight": (Weight, lambda r: r.name),
    "cache": (Cache, lambda r: [r.layer, r.part]),
    "array": (Array, lambda r: r.name),
    "value": (Value, lambda r: r.number),
}
_KINDS = {kind: (name, take) for name, (kind, take) in _REFERENCES.items()}


@dataclass(frozen=True, slots=True)
class Operator:
    """One call: its arguments by name in the schema's order, and the shape of what it returns."""

    op: str  # `linear`
    arguments: dict[str, Argument]
    shape: tuple[str | int, ...] | None  # (T or S, columns …); None: it changes its first argument

    @property
    def takes_rows(self) -> bool:
        """Whether it takes the sampled rows of a value."""
        return self.op == "embedding" and isinstance(self.arguments["weight"], Value)

    @property
    def samples(self) -> bool:
        """Whether what it returns are the sampled rows."""
        return self.takes_rows or self.op == "gather_rows"

    def weights(self) -> list[str]:
        """Names of the weights that it reads."""
        return [a.name for a in self.arguments.values() if isinstance(a, Weight)]


@dataclass(frozen=True, slots=True)
class Plan:
    """All operators of a step, in their order."""

    operators: tuple[Operator, ...]
    output: int  # the value that the step's caller gets

    def weights(self) -> list[str]:
        """Names of all weights, each once, in the order of their first use."""
        return list(dict.fromkeys(name for o in self.operators for name in o.weights()))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; floats keep every bit there."""
        operators = [
            {
                "op": o.op,
                "arguments": {name: _encode(a) for name, a in o.arguments.items()},
                "shape": None if o.shape is None else list(o.shape),
            }
            for o in self.operators
        ]
        return {"operators": operators, "output": self.output}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `as_dict` has written. Raises KernelError for anything else."""
        try:
            operators = tuple(
                Operator(
                    o["op"],
                    {name: _decode(a) for name, a in o["arguments"].items()},
                    None if o["shape"] is None else tuple(o["shape"]),
                )
                for o in data["operators"]
            )
            return cls(operators, int(data["output"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KernelError(f"This isn't a plan of version {PLAN_VERSION}: {error!r}.") from error


def _encode(argument: Argument) -> Any:
    if isinstance(argument, torch.dtype):
        return {"dtype": str(argument).removeprefix("torch.")}
    if type(argument) in _KINDS:
        name, take = _KINDS[type(argument)]
        return {name: take(argument)}
    return argument


def _decode(data: Any) -> Argument:
    if not isinstance(data, dict):
        return data  # type: ignore[no-any-return]
    [(name, value)] = data.items()
    if name == "dtype":
        dtype = getattr(torch, value)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value!r} isn't a dtype")
        return dtype
    kind, _ = _REFERENCES[name]
    return kind(*value) if isinstance(value, list) else kind(value)  # type: ignore[no-any-return]


def fixed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name, shared ones once."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def record(
    module: nn.Module, kv: KV, names: Mapping[str, Tensor], *, adapted: bool = False
) -> tuple[Plan, dict[str, Tensor]]:
    """The plan of `module(step, kv)` and the tensors that it reads, by name.

    Nothing is computed: tensors may be without data (`meta`). names: what its weights are called;
    one that has no name there is called `constant.0` and so on. adapted: of steps with adapters.
    Raises KernelError when it calls anything but Penstock's operators.
    """
    compile_counter.note("program")
    shared = any(getattr(one, "ring", None) is not None for one in module.modules())
    step = _blank_step(adapted, shared, holds_states(kv))
    with torch.inference_mode(), _Recorder(step, kv, names) as recorder:
        output = module(step, kv)
    plan = Plan(tuple(recorder.operators), recorder.value(output).number)
    return plan, {name: recorder.tensors[name] for name in plan.weights()}


class _Recorder(TorchDispatchMode):
    """Notes the operators that are called, instead of computing them."""

    def __init__(self, step: Step, kv: KV, names: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.tensors = dict(names)
        self._known: dict[int, Weight | Cache | Array | Value] = {
            id(tensor): Weight(name) for name, tensor in names.items()
        }
        self._known |= {id(getattr(step, f.name)): Array(f.name) for f in fields(step)}
        for layer, parts in enumerate(kv):
            self._known |= {id(t): Cache(layer, part) for part, t in enumerate(parts)}
        self._rows: list[str] = []  # of each value
        self._alive: list[Tensor] = []  # so that an id stays that of one tensor
        self._constants = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its compiler, for a second and more, at the first call."""
        return False

    def value(self, tensor: Tensor) -> Value:
        """What stands for a tensor that an operator returned."""
        found = self._known.get(id(tensor))
        if not isinstance(found, Value):
            raise KernelError("A step must return what its last operator has returned.")
        return found

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
        arguments = {name: self._argument(a) for name, a in complete.items()}
        _check_arrays(op, arguments)
        output = ops.op(op).fake(**complete)
        if output is not None and not isinstance(output, Tensor):
            raise not_built(op)
        operator = Operator(op, arguments, None)
        if output is not None:
            rows = [self._rows[a.number] for a in arguments.values() if isinstance(a, Value)]
            self._rows.append("S" if operator.samples else [*rows, "T"][0])
            self._known[id(output)] = Value(len(self._rows) - 1)
            self._alive.append(output)
            operator = Operator(op, arguments, (self._rows[-1], *output.shape[1:]))
        self.operators.append(operator)
        return output

    def _argument(self, given: Any) -> Argument:
        if not isinstance(given, Tensor):
            if isinstance(given, None | bool | int | float | str | torch.dtype):
                return given
            raise KernelError(f"A {type(given).__name__} can't be an argument in a program.")
        if id(given) not in self._known:
            name = f"constant.{self._constants}"
            self._constants += 1
            self._known[id(given)] = Weight(name)
            self.tensors[name] = given
            self._alive.append(given)
        return self._known[id(given)]


def not_built(op: str) -> KernelError:
    """The error for an operator that programs don't have."""
    return KernelError(
        f"{op} can't be part of a program. Set enforce_eager=True to call the operators of this "
        "decoder one by one."
    )


def _check_arrays(op: str, arguments: Mapping[str, Argument]) -> None:
    """The step's arrays stand where programs put them."""
    takes_rows = op == "embedding" and isinstance(arguments["weight"], Value)
    for name, argument in arguments.items():
        array = argument.name if isinstance(argument, Array) else None
        if takes_rows and name == "tokens" and array != "sample_at":
            raise KernelError("Only the sampled rows of a value can be taken.")
        if array is not None and op != "embedding" and array != name:
            raise KernelError(f"{op} takes the step's {array} as its {name}.")


def _blank_step(adapted: bool, shared: bool, stateful: bool) -> Step:
    """A step whose arrays are known by what they are; nothing of them is read. shared: by ranks
    that have some rows each.
    """

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    arrays = ints(2), ints(2), ints(2), ints(3), ints(2), ints(2, 2), ints(2)
    if shared:
        return RingStep(*arrays, ints(2), ints(3))
    if stateful:
        states = ints(2), ints(2, 2)
        if adapted:
            return AdaptedStatefulStep(*arrays, *states, ints(2))
        return StatefulStep(*arrays, *states)
    return AdaptedStep(*arrays, ints(2)) if adapted else Step(*arrays)

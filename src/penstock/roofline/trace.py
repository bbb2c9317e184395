"""Timing every operator of a forward pass, and writing spans as a Chrome trace.

Each call that reaches torch's dispatcher is timed on its own, so what lies between two of them is
Python. The clock's own cost lengthens the pass: the undisturbed step is timed apart.
Format: Chrome's Trace Event Format, which chrome://tracing and Perfetto read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.nn import Decoder
from penstock.nn.linear import Linear
from penstock.ops.registry import NAMESPACE
from penstock.roofline.cost import OPS

OTHER = "other"
"""The row of what has no cost of its own: views, copies of rows."""

_ROWS = (
    ("embedding", "embedding"),
    ("norm", "norm"),
    ("rotary", "rotary"),
    ("attention", "attention"),
    ("silu", "activation"),
    ("gelu", "activation"),
    ("softcap", "activation"),
)
"""What an operator's name contains, and its row."""


@dataclass(slots=True)
class OpEvent:
    """One call of an operator."""

    row: str  # one of OPS, or OTHER
    name: str  # `penstock.linear`
    start: float  # time.perf_counter()
    seconds: float
    shapes: str  # of its tensors


class OpTimer(TorchDispatchMode):
    """While entered, times every operator; `take` gives them.

    A call inside a `Linear` belongs to that matrix, whatever the operator is called.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[OpEvent] = []
        self._inside: list[str] = []
        self._hooks: list[Any] = []
        self._linears = [
            (name.rpartition(".")[2], module)
            for name, module in decoder.named_modules()
            if isinstance(module, Linear)
        ]

    def __enter__(self) -> OpTimer:
        for row, module in self._linears:
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, row)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, row: str, module: nn.Module, arguments: Any) -> None:
        self._inside.append(row)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = perf_counter()
        output = func(*args, **(kwargs or {}))
        seconds = perf_counter() - start
        name = func.name().partition(".")[0].replace("::", ".")
        self._events.append(OpEvent(self._row(name), name, start, seconds, _shapes(args)))
        return output

    def _row(self, name: str) -> str:
        if self._inside:
            row = self._inside[-1]
            return row if row in OPS else OTHER
        space, _, op = name.partition(".")
        if space == NAMESPACE:
            return next((row for part, row in _ROWS if part in op), OTHER)
        return "norm" if op == "add_" else OTHER  # a residual add that no norm takes along

    def take(self) -> list[OpEvent]:
        """The calls since the last time."""
        events, self._events = self._events, []
        return events


def _shapes(arguments: Iterable[Any]) -> str:
    return " ".join(str(list(a.shape)) for a in arguments if isinstance(a, torch.Tensor))


@dataclass(slots=True)
class Span:
    """Something that took time; spans that lie in another are drawn below it."""

    name: str
    category: str
    start: float  # seconds
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)


def chrome_trace(spans: Iterable[Span], title: str) -> dict[str, Any]:
    """The spans as one thread of one process, in microseconds since the first."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.seconds))
    begin = ordered[0].start if ordered else 0.0
    names = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": title}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "engine"}},
    ]
    events = [
        {
            "name": span.name,
            "cat": span.category,
            "ph": "X",
            "ts": (span.start - begin) * 1e6,
            "dur": span.seconds * 1e6,
            "pid": 1,
            "tid": 1,
            "args": span.arguments,
        }
        for span in ordered
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}

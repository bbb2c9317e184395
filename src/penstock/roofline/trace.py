"""Timing every operator of a forward pass, and writing spans as a Chrome trace.

Each call that reaches torch's dispatcher is timed on its own, so what lies between two of them is
Python. The clock's own cost lengthens the pass: the undisturbed step is timed apart.
Format: Chrome's Trace Event Format, which chrome://tracing and Perfetto read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.nn import Decoder
from penstock.nn.decoder import MATRICES
from penstock.nn.linear import Linear
from penstock.ops.registry import NAMESPACE
from penstock.roofline.cost import OPS

AHEAD_CYCLES = 60_000_000
"""About 30 ms of a GPU's clock, in which Python queues a forward pass."""

OTHER = "other"
"""The row of what has no cost of its own: views, copies of rows."""

_ROWS = (
    ("embedding", "embedding"),
    ("norm", "norm"),
    ("add_", "norm"),  # to the residual, after a norm
    ("scale_", "norm"),
    ("multiply_", "input_gate"),
    ("rotary", "rotary"),
    ("mla_cache", "rotary"),
    ("gate_rows_", "experts"),
    ("gate_by_", "attention"),
    ("delta_rule", "delta"),
    ("mamba2", "mamba"),
    ("short_conv", "conv"),
    ("mla_query", "heads"),
    ("head_linear", "heads"),
    ("attention", "attention"),
    ("softcap", "softcap"),
    ("experts", "experts"),
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


class Rows:
    """Which row of the table of costs an operator belongs to: a product to its matrix's."""

    def __init__(self, decoder: Decoder) -> None:
        self._matrices = {
            module.packed["weight"].data_ptr(): _row(name)
            for name, module in decoder.named_modules()
            if isinstance(module, Linear)
        }

    def of(self, name: str, arguments: Iterable[Any]) -> str:
        """One of OPS, or OTHER; name: `penstock.linear`."""
        space, _, op = name.partition(".")
        if space != NAMESPACE:
            return OTHER
        if op.startswith("linear"):
            tensors = (a for a in arguments if isinstance(a, torch.Tensor))
            found = (self._matrices.get(tensor.data_ptr()) for tensor in tensors)
            return next((row for row in found if row in OPS), OTHER)
        return next((row for part, row in _ROWS if part in op), OTHER)


def _row(module: str) -> str:
    """`shared_up` of `layers.3.mlp.shared.up`; of others their last name."""
    found = (row for row, at in MATRICES.items() if module.endswith(f".{at}"))
    return next(found, module.rpartition(".")[2])


class OpTimer(TorchDispatchMode):
    """While entered, times every operator that Python calls; `take` gives them."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[OpEvent] = []
        self._rows = rows

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its compiler, for a second and more, at the first call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = perf_counter()
        output = func(*args, **(kwargs or {}))
        seconds = perf_counter() - start
        name = func.name().partition(".")[0].replace("::", ".")
        self._events.append(OpEvent(self._rows.of(name, args), name, start, seconds, _shapes(args)))
        return output

    def take(self) -> list[OpEvent]:
        """The calls since the last time."""
        events, self._events = self._events, []
        return events


class GpuOpTimer(OpTimer):
    """The same by a GPU's clock.

    Calls are queued behind a kernel that keeps the GPU busy, so that none waits for its launch.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        super().__init__(rows)
        self._device = device
        self._marks: list[tuple[Any, Any, str, str, str]] = []
        self._begun = perf_counter()
        torch.cuda._sleep(AHEAD_CYCLES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        output = func(*args, **(kwargs or {}))
        end.record()
        name = func.name().partition(".")[0].replace("::", ".")
        self._marks.append((start, end, self._rows.of(name, args), name, _shapes(args)))
        return output

    def take(self) -> list[OpEvent]:
        """The calls, when the GPU is through with them; the first one's start is the host's."""
        torch.cuda.synchronize(self._device)
        marks, self._marks = self._marks, []
        return [
            OpEvent(
                row,
                name,
                self._begun + marks[0][0].elapsed_time(start) / 1e3,
                start.elapsed_time(end) / 1e3,
                shapes,
            )
            for start, end, row, name, shapes in marks
        ]


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

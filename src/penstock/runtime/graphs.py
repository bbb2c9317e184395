"""A decoder on a GPU: steps that decode are recorded once and replayed as a whole.

A step of a large model is hundreds of kernels, and starting one from Python takes longer than a
small one runs. Recorded in a CUDA graph, they start by one call. A graph's kernels have fixed
sizes and addresses, so steps are padded to one of a few numbers of sequences and widths of the
block table, and their arrays are copied to where the graph reads them. Steps with prompts in them
run kernel by kernel: they are long enough.

Graphs are found by a hash of what they were recorded with: sequences and width as padded, the
addresses of the step's arrays and of the cache, and the adapters in use (none so far).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.config import CompilationConfig
from penstock.errors import ConfigError
from penstock.runtime.device import Device
from penstock.runtime.staging import Staging, StepShape
from penstock.step import KV, Step

logger = logging.getLogger("penstock")

LEAST_WIDTH, WIDER = 8, 4
"""Blocks of the narrowest table that graphs are recorded for, and how much wider each next is."""

Compute = Callable[[Step], Tensor]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps there will be."""

    sequences: int
    tokens: int
    width: int  # blocks of the longest sequence


@dataclass(slots=True)
class GraphCounts:
    """How steps have run."""

    captures: int = 0
    replays: int = 0
    eager: int = 0  # steps that were launched kernel by kernel
    capture_s: float = 0.0


class Recorder(Protocol):
    """Makes of a computation one that is started by a single call."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What repeats it, and where its result then is."""
        ...


class CudaGraphs:
    """Recorded by the GPU's driver; all graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # torch's own is of the GPU that was first

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # compiles kernels, which can't be done while recording
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = compute()
        return graph.replay, result


class Repeated:
    """The computation itself, again: stands for a graph where kernels are interpreted."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = compute()

        def again() -> None:
            result.copy_(compute())

        return again, result


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    logits: Tensor  # [B, V] of the padded step


def capture_sizes(most: int) -> tuple[int, ...]:
    """The numbers of sequences that graphs are recorded for: 1, 2, 4, then every eighth."""
    sizes = [size for size in (1, 2, 4) if size < most]
    return (*sizes, *range(8, most, 8), most)


def capture_widths(most: int) -> tuple[int, ...]:
    """The widths of the block table that graphs are recorded for, the widest first."""
    widths = [most]
    at = LEAST_WIDTH
    while at < most:
        widths.append(at)
        at *= WIDER
    return tuple(sorted(widths, reverse=True))


class GraphForward:
    """`Forward` of one decoder on a GPU; one thread's.

    Logits lie on the GPU and are good until the next step.
    """

    def __init__(
        self,
        decoder: nn.Module,
        kv: KV,
        device: Device,
        limits: StepLimits,
        compilation: CompilationConfig,
    ) -> None:
        self.compilation = compilation
        self.counts = GraphCounts()
        self._device = device
        self._limits = limits
        self._compute: Callable[[Step, KV], Tensor] = decoder
        if compilation.mode == "compile":
            self._compute = torch.compile(decoder, dynamic=True)
        self._kv = kv
        self._widths = capture_widths(limits.width)
        self._staging = Staging(device.torch)
        self._sizes: Sequence[int] = ()
        if compilation.cudagraph_mode != "none":
            self._sizes = _sizes(compilation.cudagraph_capture_sizes, limits)
            self._recorder: Recorder = CudaGraphs(device.torch) if device.is_gpu else Repeated()
            largest = self._padded(self._sizes[-1], limits.width)
            self._inputs = Staging(device.torch, largest.ends[-1])
            caches = (part.data_ptr() for layer in kv for part in layer)
            self._where = hash((self._inputs.address, *caches))
        self._graphs: dict[tuple[int, int, int, tuple[int, ...]], _Graph] = {}
        self._logits: Tensor | None = None  # of the largest graph: the others' go there, too

    @property
    def on_gpu(self) -> bool:
        """Whether kernels are compiled for a GPU, not interpreted."""
        return self._device.is_gpu

    def enter(self) -> None:
        """Have this thread launch kernels on the device: each has a GPU of its own in mind."""
        if self._device.is_gpu:
            torch.cuda.set_device(self._device.torch)

    def __call__(self, step: Step, kv: KV) -> Tensor:
        return self._run(step, kv, None)

    def follow(self, step: Step, kv: KV, tokens: Tensor) -> Tensor:
        """The same of tokens that are on the device already: `step.tokens` says which."""
        return self._run(step, kv, tokens)

    def _run(self, step: Step, kv: KV, tokens: Tensor | None) -> Tensor:
        shape = self._graph_shape(step) if kv is self._kv else None
        sent = self._staging.send(step) if shape is None else self._inputs.send(step, shape)
        if tokens is not None:
            given = sent.tokens[: step.num_tokens]
            given.copy_(tokens.index_select(0, given))
        if shape is None:
            self.counts.eager += 1
            return self._compute(sent, kv)
        return self._graph(sent, shape).logits[: step.num_sequences]

    @property
    def how(self) -> str:
        """How steps run, for readers."""
        compiled = "code by torch.compile" if self.compilation.mode == "compile" else "kernels"
        graphs = "CUDA graphs of steps that decode, else " if self._sizes else ""
        return graphs + compiled + " one by one"

    def beside(self, module: nn.Module, kv: KV) -> GraphForward:
        """Another module's over the same layers, without graphs of its own."""
        chosen = replace(self.compilation, cudagraph_mode="none", cudagraph_capture_sizes=None)
        return GraphForward(module, kv, self._device, self._limits, chosen)

    def warm_up(self) -> None:
        """Record every graph that there may be, and compile kernels: no request waits for it."""
        blank = _blank(1)
        with torch.inference_mode():
            for width in self._widths:
                for size in reversed(self._sizes):  # the largest first: others fit in its memory
                    shape = self._padded(size, width)
                    self._graph(self._inputs.send(blank, shape), shape)
            for step in self._blanks():
                self._compute(self._staging.send(step), self._kv)

    def _blanks(self) -> Iterator[Step]:
        """Steps that want every kernel which those launched one by one may want.

        Products have kernels for buckets of rows; attention for few or many sequences, tables of
        one span or more, and steps of few rows, which start early, or many.
        """
        limits = self._limits
        for tokens in _doubled(limits.tokens):
            yield _blank(tokens, min(tokens, limits.sequences))
        for tokens in {min(self._device.few_rows, limits.tokens), limits.tokens}:
            for sequences in {min(2, limits.sequences), limits.sequences}:
                for width in self._widths:
                    yield _blank(tokens, 1, sequences, width)

    def warm_up_heads(self, width: int) -> None:
        """The same of a module that gives logits of all its rows; `width` of them are looked at."""
        with torch.inference_mode():
            for rows in _doubled(self._limits.tokens):
                logits = self._compute(self._staging.send(_blank(rows, rows)), self._kv)
                if logits.shape[1] > width:
                    ops.softmax_top_k(logits, logits.new_ones(rows), width)

    def _graph_shape(self, step: Step) -> StepShape | None:
        """What the step is padded to; None where it is launched kernel by kernel."""
        sequences = step.num_sequences
        decodes = step.num_tokens == sequences == len(step.sample_at) and step.copies is None
        width = step.block_table.shape[1]
        if not self._sizes or not decodes or sequences > self._sizes[-1]:
            return None
        if width > self._limits.width:  # it would move the arrays that graphs read
            return None
        return self._padded(self._sizes[bisect_left(self._sizes, sequences)], width)

    def _padded(self, sequences: int, width: int) -> StepShape:
        wide = min(each for each in self._widths if each >= width)
        return StepShape(sequences, sequences, wide, sequences)

    def _graph(self, step: Step, shape: StepShape) -> _Graph:
        """The graph of such steps, having run once over this one."""
        adapters: tuple[int, ...] = ()  # a later part of the engine has some
        key = shape.sequences, shape.width, self._where, adapters
        found = self._graphs.get(key)
        if found is not None:
            self.counts.replays += 1
            found.replay()
            return found
        begun = time.perf_counter()
        replay, logits = self._recorder.record(lambda: self._compute_into(step))
        if self._logits is None or len(logits) > len(self._logits):
            self._logits = logits
        found = self._graphs[key] = _Graph(replay, logits)
        replay()
        self.counts.captures += 1
        self.counts.capture_s += time.perf_counter() - begun
        logger.debug("Recorded a graph of %d sequences, %d blocks.", shape.sequences, shape.width)
        return found

    def _compute_into(self, step: Step) -> Tensor:
        """Logits in the memory that graphs share: each one's own would be as much as a cache."""
        logits = self._compute(step, self._kv)
        if self._logits is None or len(logits) > len(self._logits):
            return logits
        return self._logits[: len(logits)].copy_(logits)


def _sizes(asked: Sequence[int] | None, limits: StepLimits) -> Sequence[int]:
    """Sequences that graphs are recorded for, in order.

    Raises ConfigError for more than a step ever has: their memory isn't reserved.
    """
    most = min(limits.sequences, limits.tokens)
    if asked is None:
        return capture_sizes(most)
    if asked[-1] > most:
        raise ConfigError(
            f"cudagraph_capture_sizes asks for graphs of {asked[-1]:,} sequences, and no step has "
            f"more than {most:,} (max_num_seqs {limits.sequences:,}, max_num_batched_tokens "
            f"{limits.tokens:,}). Leave larger sizes out, or raise those."
        )
    return asked


def _doubled(most: int) -> Iterator[int]:
    """1, 2, 4, … and `most`."""
    at = 1
    while at < most:
        yield at
        at *= 2
    yield most


def _blank(tokens: int, sampled: int = 1, sequences: int = 1, width: int = 1) -> Step:
    """A step of tokens that belong to nobody, for what compiles kernels by it.

    sampled: logits of so many of them; sequences: without queries; width: of their table.
    """

    def ints(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32)

    nobody, rows = ints(tokens, value=-1), torch.arange(sampled, dtype=torch.int32)
    table = ints(sequences, width)
    return Step(
        ints(tokens), ints(tokens), nobody, ints(sequences + 1), ints(sequences), table, rows
    )

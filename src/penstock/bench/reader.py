"""A variant that reads windows of a text: its logits, and its residual stream after each layer.

Where a variant asks for other kernels than this process runs, a process of its own reads: which
kernels there are is decided when the library is loaded.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.bench.precision import Bits, bits_of
from penstock.bench.tf32 import Tf32
from penstock.bench.variant import TF32, Variant
from penstock.errors import ConfigError, KernelError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime import Runtime, load_runtime
from penstock.step import Step

PROCESS = "penstock.bench.reader_process"
PATIENCE_S = 10.0
"""For a reading process to end by itself."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of one window: S rows that predict, L layers."""

    logits: Tensor  # [S, V] float32; −∞ of tokens that a reduced vocabulary lacks
    residuals: Tensor | None = None  # [L + 1, S, D]: after the embedding, and after each layer
    as_read: bool = True  # the pass that gave the residuals gave the same logits, bit for bit


@dataclass(frozen=True, slots=True)
class About:
    """A variant as it was loaded."""

    vocab_size: int  # ids of its tokenizer's vocabulary
    layers: int  # whose residuals can be read; 0 where the model is one program without modules
    hidden: int
    weights: str  # the name of their formats
    cache: str  # what keys and values are stored as
    kernels: str  # an instruction set, or `reference`
    calls: str  # `one native call a step`, or `operators one by one`
    kept_tokens: int | None = None  # of a reduced vocabulary
    bits: Bits | None = None  # of its values; None where that isn't known


class Reader(Protocol):
    """A loaded variant."""

    @property
    def about(self) -> About:
        """What it is."""

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Token ids of each, as its tokenizer starts a text."""

    def pieces(self) -> list[bytes]:
        """The bytes of every token of its vocabulary."""

    def kept(self) -> Tensor | None:
        """The ids [N] int64 that it has; None: all of its vocabulary."""

    def read(self, ids: Sequence[int], first: int, layers: bool = False) -> Reading:
        """A sequence of its own, in one step: the rows that predict `ids[first:]`.

        layers: the residual stream of these rows as well, where it can be read.
        """

    def close(self) -> None:
        """Let go of the model."""


class LocalReader:
    """A reader in this process."""

    def __init__(self, runtime: Runtime, form: str | None = None, *, by_tf32: bool = False) -> None:
        """form: of steps that run by the model's graph (`bench.graph_form`); by_tf32: of float32's
        operators, called one by one, products are TF32's.
        """
        self._products = Tf32 if by_tf32 else nullcontext
        if form is not None:
            from penstock.bench.graph_form import by_graph
            from penstock.runtime.package import quiet

            with quiet():
                runtime = by_graph(runtime, form)
        self._runtime = runtime
        model: object = runtime.model.model
        by_modules = form is None and isinstance(model, Decoder)
        self._decoder = model if by_modules and isinstance(model, Decoder) else None
        graphs, self._by_modules = runtime.runner.graphs, None
        if graphs is not None and self._decoder is not None:  # which takes a step's arrays there
            self._by_modules = graphs.beside(self._decoder, runtime.runner.kv)
        spec, formats = runtime.model.spec.decoder, runtime.model.model.formats
        self.about = About(
            vocab_size=runtime.vocab_size,
            layers=0 if self._decoder is None else len(self._decoder.layers),
            hidden=spec.hidden,
            weights=TF32 if by_tf32 else formats.name,
            cache=runtime.layout.stored,
            kernels=native.isa or "reference",
            calls="its graph, one by one" if form == "graph" else runtime.runner.how,
            kept_tokens=None if runtime.vocab_map is None else len(runtime.vocab_map),
            bits=bits_of(formats, runtime.model.dtype, runtime.layout.stored, by_tf32),
        )

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Token ids of each, as the tokenizer starts a text."""
        assert self._runtime.tokenizer is not None  # a variant never skips it
        return [self._runtime.tokenizer.encode(document) for document in documents]

    def pieces(self) -> list[bytes]:
        """The bytes of every token of the vocabulary."""
        assert self._runtime.tokenizer is not None
        table = self._runtime.tokenizer.piece_table(skip_special_tokens=False)
        return [table[i] for i in range(self.about.vocab_size)]

    def kept(self) -> Tensor | None:
        """The ids [N] int64 that it has; None: all of its vocabulary."""
        found = self._runtime.vocab_map
        return None if found is None else torch.from_numpy(found.kept).long()

    def read(self, ids: Sequence[int], first: int, layers: bool = False) -> Reading:
        """A sequence of its own, in one step: the rows that predict `ids[first:]`."""
        with self._products():
            return self._read(ids, first, layers)

    def _read(self, ids: Sequence[int], first: int, layers: bool) -> Reading:
        step = window_step(self._runtime, ids, first)
        runner = self._runtime.runner
        if not layers or self._decoder is None:
            return Reading(_kept(runner.forward(step)))
        rows = slice(first - 1, len(ids) - 1)
        with residuals(self._decoder, rows) as taps:
            if runner.by_modules:
                return Reading(_kept(runner.forward(step)), torch.stack(taps))
            logits = _kept(runner.forward(step))
            again = runner.by(self._by_modules or self._decoder, step).cpu()
        return Reading(logits, torch.stack(taps), torch.equal(logits, again))

    def close(self) -> None:
        """Nothing is held that the garbage collector doesn't find."""


def _kept(logits: Tensor) -> Tensor:
    """In the host's memory; a runner's are good until its next step."""
    return logits.to("cpu", copy=True)


@contextmanager
def residuals(decoder: Decoder, rows: slice) -> Iterator[list[Tensor]]:
    """A list that one eager pass fills: the stream's `rows` after the embedding and each layer."""
    found: list[Tensor] = []

    def before(_: object, inputs: tuple[Any, ...]) -> None:
        found.append(_kept(inputs[0][rows]))

    def after(_: object, inputs: tuple[Any, ...], output: object) -> None:
        found.append(_kept(inputs[0][rows]))  # a layer adds to it in place

    hooks = [decoder.layers[0].register_forward_pre_hook(before)]
    hooks += [layer.register_forward_hook(after) for layer in decoder.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def window_step(runtime: Runtime, ids: Sequence[int], first: int) -> Step:
    """The step that reads `ids` from position 0 in blocks from 0, for rows first − 1 … T − 2.

    Raises ConfigError where the cache is too small.
    """
    size = len(ids)
    blocks = runtime.layout.blocks_for(size)
    if blocks > runtime.num_blocks:
        raise ConfigError(
            f"A window of {size} tokens needs {blocks} blocks, but the cache holds "
            f"{runtime.num_blocks}. Take a shorter window."
        )
    recent = runtime.runner.recent
    if recent is not None and blocks > recent.num_places:
        raise ConfigError(
            f"A window of {size} tokens writes {blocks} blocks in one step, but this cache keeps "
            f"{recent.num_places} as they are written. Take a shorter window, or an engine with a "
            "larger --profile."
        )

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows = torch.arange(size, dtype=torch.int32)
    return Step(
        tokens=ints(ids),
        positions=rows,
        slots=rows,
        query_start=ints([0, size]),
        context_len=ints([size]),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        sample_at=rows[first - 1 : -1].clone(),
    )


class ProcessReader:
    """A reader in a process with kernels of its own; as a context manager, it ends with it."""

    def __init__(self, variant: Variant, window: int | None) -> None:
        """Load the variant there; raises what loading raises."""
        self._variant = variant
        ours, theirs = Pipe()
        environment = variant.environment(os.environ)
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._pipe: Connection = ours
        try:
            self.about: About = self._ask("load", asdict(variant), window)
        except BaseException:
            self.close()
            raise

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Token ids of each, as its tokenizer starts a text."""
        found: list[list[int]] = self._ask("encode", list(documents))
        return found

    def pieces(self) -> list[bytes]:
        """The bytes of every token of its vocabulary."""
        found: list[bytes] = self._ask("pieces")
        return found

    def kept(self) -> Tensor | None:
        """The ids [N] int64 that it has; None: all of its vocabulary."""
        found: Tensor | None = self._ask("kept")
        return found

    def read(self, ids: Sequence[int], first: int, layers: bool = False) -> Reading:
        """A sequence of its own, in one step: the rows that predict `ids[first:]`."""
        found: Reading = self._ask("read", list(ids), first, layers)
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            self._pipe.send_bytes(pickle.dumps((what, *arguments)))
            fine, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise KernelError(
                f"The process that runs {self._variant} has ended: {self._ending()}."
            ) from error
        if not fine:
            raise answer
        return answer

    def _ending(self) -> str:
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "it doesn't answer"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"signal {name}{hint}"


Load = Callable[[Any], Runtime]
"""From an EngineConfig to a runtime: `load_runtime`, or one that shows its progress."""


@contextmanager
def open_reader(
    variant: Variant, window: int | None, load: Load = load_runtime
) -> Iterator[Reader]:
    """A reader, here or in a process of its own; window: tokens at once, None for the model's."""
    reader: Reader
    if variant.here:
        runtime = load(variant.config(window))
        reader = LocalReader(runtime, variant.form, by_tf32=variant.dtype == TF32)
    else:
        reader = ProcessReader(variant, window)
    try:
        yield reader
    finally:
        reader.close()

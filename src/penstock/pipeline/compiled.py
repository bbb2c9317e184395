"""A graph as an AOTInductor package: the third `Forward`, beside eager calls and native programs.

torch compiles what lies between the operators to C++ and calls the same kernels, so the bits are
the same. Weights stay outside: a package takes them with every call, and none is repacked. One
package serves every shape: nothing in it depends on how many rows there are, since shapes only
reach Penstock's operators, which choose by them at run time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, KernelError
from penstock.models.exported import sha256
from penstock.pipeline.graph import (
    Graph,
    Weights,
    check_cache,
    check_weights,
    quiet,
    with_derived,
)
from penstock.runtime import compile_counter
from penstock.step import KV, Step

_FORMAT = 1
_AGAIN = "Compile the graph again: compile_graph(graph, folder)."


def compile_graph(graph: Graph, folder: Path) -> Path:
    """The package of `graph` in `folder`, compiled unless it is there.

    It is found again by what it depends on: the graph's digest, torch's version, the compiler and
    this CPU's vectors. Takes tens of seconds, most of them the C++ compiler's.
    Raises ConfigError where there is no C++ compiler.
    """
    target = {"graph": graph.digest, "compiler": _compiler(), **_this_machine()}
    key = hashlib.sha256(json.dumps([_FORMAT, target]).encode()).hexdigest()[:24]
    file = folder / f"{key}.pt2"
    if file.exists() and _manifest(file).exists():
        _check(file, graph)
        return file
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.{os.getpid()}.partial.pt2"
    try:
        _compile(graph, partial)
        found = {"format": _FORMAT, "sha256": sha256(partial), **target}
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    described = partial.with_suffix(".json")
    described.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    described.replace(_manifest(file))
    return file


def _compile(graph: Graph, file: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    compile_counter.note("aot_inductor")
    graph.program.example_inputs = (graph.example(), {})
    try:
        with quiet():
            aoti_compile_and_package(graph.program, package_path=str(file))
    finally:
        graph.program.example_inputs = None


class CompiledForward:
    """`Forward` by a package: logits [S, V] float32 of the rows `step.sample_at`."""

    def __init__(self, file: Path, graph: Graph, weights: Weights) -> None:
        """Load the package that `compile_graph` made of `graph`. Nothing is compiled.

        A package reads its inputs unchecked and ends the process where one is missing, so all of
        them are checked here and before each call.
        Raises ConfigError for a file that is damaged or made for something else, WeightsError for
        weights that the graph doesn't take.
        """
        _check(file, graph)
        complete = with_derived(graph, weights)
        check_weights(graph, complete)
        from torch._inductor import aoti_load_package

        with quiet():
            self._package: Any = aoti_load_package(str(file))
        self._graph = graph
        self._weights = list(complete.values())
        self._kv: KV | None = None
        self._caches: list[Tensor] = []

    def __call__(self, step: Step, kv: KV) -> Tensor:
        if kv is not self._kv:
            check_cache(self._graph, kv)
            if not all(part.is_contiguous() for layer in kv for part in layer):
                raise KernelError("A compiled graph takes contiguous caches.")
            self._kv, self._caches = kv, [part for layer in kv for part in layer]
        arrays = _arrays(step)
        logits: Tensor = self._package.loader.boxed_run([*arrays, *self._caches, *self._weights])[0]
        return logits


def _arrays(step: Step) -> list[Tensor]:
    """A step's arrays, found to fit together; one that is a view of a wider array is copied."""
    arrays = [getattr(step, f.name).contiguous() for f in fields(step)]
    if any(a.dtype is not torch.int32 for a in arrays):
        raise KernelError(f"A step's arrays are int32, not {[str(a.dtype) for a in arrays]}.")
    tokens, batch = step.tokens.shape, step.context_len.shape
    fits = step.positions.shape == tokens == step.slots.shape and step.block_table.dim() == 2
    if not fits or (*batch, batch[0] + 1) != (step.block_table.shape[0], len(step.query_start)):
        shapes = ", ".join(str(list(a.shape)) for a in arrays)
        raise KernelError(f"A step's arrays don't fit together: {shapes} (see penstock.Step).")
    return arrays


def _check(file: Path, graph: Graph) -> None:
    """Raises ConfigError unless `file` is whole, of `graph`, and for this torch and machine."""
    manifest = _manifest(file)
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        stored = str(found["sha256"])
        has = sha256(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} can't be used: {error!r}. {_AGAIN}") from error
    if has != stored:
        raise ConfigError(f"{file} is damaged: its SHA-256 isn't that of {manifest.name}. {_AGAIN}")
    wanted = {"format": _FORMAT, "graph": graph.digest, **_this_machine()}
    for name, want in wanted.items():
        if found.get(name) != want:
            raise ConfigError(
                f"{file} was compiled for another {name}: {found.get(name)}, not {want}. {_AGAIN}"
            )


def _manifest(file: Path) -> Path:
    return file.with_suffix(".json")


def _this_machine() -> dict[str, str]:
    return {"torch": torch.__version__, "vectors": torch.backends.cpu.get_cpu_capability()}


def _compiler() -> str:
    """The first line of what the C++ compiler says of itself."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"Compiling a graph needs a C++ compiler, and there is no {name!r}. Install g++, name "
            "another by CXX, or run the graph as a native program, which needs none."
        )
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]

"""A graph compiled ahead, as a `Forward`: an AOTInductor package over weights that stay outside.

`penstock.pipeline.compiled` makes packages. A package takes its weights with every call, so none is
repacked or held twice; it serves every shape of step, since sizes only reach Penstock's operators.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, KernelError
from penstock.models.exported import sha256
from penstock.runtime.inputs import Inputs, Weights
from penstock.step import KV, Step

PACKAGE_VERSION = 2
"""Of what is compiled and of the file that describes it."""


class PackageForward:
    """`Forward` by a package: logits [S, V] float32 of the rows `step.sample_at`."""

    def __init__(self, file: Path, weights: Weights) -> None:
        """Load the package `file` over these weights. Nothing is compiled.

        A package reads its inputs unchecked and ends the process where one is missing, so all of
        them are checked here and before each call.
        Raises ConfigError for a file that is damaged or made for another torch or processor,
        WeightsError for weights that its graph doesn't take.
        """
        described = read_package(file)
        try:
            self.inputs = Inputs.from_dict(described["inputs"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{description(file)} can't be read: {error!r}. Compile the graph again."
            ) from error
        self._weights = list(self.inputs.complete(weights).values())
        from torch._inductor import aoti_load_package

        with quiet():
            self._package: Any = aoti_load_package(str(file))
        self._kv: KV | None = None
        self._caches: list[Tensor] = []

    def __call__(self, step: Step, kv: KV) -> Tensor:
        if kv is not self._kv:
            self.inputs.check_cache(kv)
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


def description(file: Path) -> Path:
    """The file beside a package that says what it is of and for."""
    return file.with_suffix(".json")


def read_package(file: Path) -> Mapping[str, Any]:
    """What the package `file` is of. Raises ConfigError unless it is whole and for this machine."""
    again = "Compile the graph again."
    try:
        found = json.loads(description(file).read_text(encoding="utf-8"))
        stored = str(found["sha256"])
        has = sha256(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} can't be used: {error!r}. {again}") from error
    if has != stored:
        name = description(file).name
        raise ConfigError(f"{file} is damaged: its SHA-256 isn't that of {name}. {again}")
    for name, want in target().items():
        if found.get(name) != want:
            raise ConfigError(
                f"{file} was compiled for another {name}: {found.get(name)}, not {want}. {again}"
            )
    return dict(found)


def target() -> dict[str, Any]:
    """What a package must have been compiled for to run here."""
    return {
        "format": PACKAGE_VERSION,
        "torch": torch.__version__,
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns of its own future while it exports, compiles and loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield

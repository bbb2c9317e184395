"""What a graph takes beside a step: its caches and weights, by dtype and shape, as data.

A graph's code reads its inputs as it was made for them, and a compiled one unchecked; so whoever
runs one holds them against this first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError, WeightsError, listed
from penstock.step import KV

Weights = Mapping[str, Tensor]
"""A decoder's packed tensors by the names of its parameters, its tables among them."""


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor's dtype and shape; of a cache's part, the shape of one block."""

    dtype: str  # bfloat16
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """That of a tensor, fake ones too."""
        return cls(_name(tensor.dtype), tuple(tensor.shape))

    @classmethod
    def of_block(cls, part: Tensor) -> Form:
        """That of one block of a cache's part [blocks, …]."""
        return cls(_name(part.dtype), tuple(part.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Derived:
    """A weight that is computed from others when a graph is bound: `fold-constants`."""

    operator: str
    arguments: dict[str, Any]  # as the operator takes them; {"weight": name} stands for a weight


@dataclass(frozen=True, slots=True)
class Inputs:
    """The caches and weights of one graph, in the order in which it takes them."""

    caches: tuple[tuple[Form, ...], ...]  # of each layer, its parts
    weights: Mapping[str, Form]  # derived ones among them
    derived: Mapping[str, Derived]

    @property
    def sources(self) -> list[str]:
        """The weights that must be given: those it takes, and those that others derive from."""
        given = [name for name in self.weights if name not in self.derived]
        for derived in self.derived.values():
            given += [v["weight"] for v in derived.arguments.values() if isinstance(v, dict)]
        return [name for name in dict.fromkeys(given) if name not in self.derived]

    def complete(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors that the graph takes, those it derives from others computed.

        Raises WeightsError when one is missing or isn't what the graph was made for.
        """
        missing = [name for name in self.sources if name not in weights]
        if missing:
            raise WeightsError(
                f"The graph takes {len(missing)} weights that aren't here: "
                f"{listed(missing)}. It is of another model, or of other formats."
            )
        found = dict(weights)
        for name, derived in self.derived.items():
            given = {
                key: found[value["weight"]] if isinstance(value, dict) else value
                for key, value in derived.arguments.items()
            }
            found[name] = ops.op(derived.operator).call(**given)
        for name, want in self.weights.items():
            got = found[name]
            if Form.of(got) != want or not got.is_contiguous():
                raise WeightsError(
                    f"The graph takes {name} as {want}, not as {Form.of(got)}"
                    + ("." if got.is_contiguous() else ", and contiguous.")
                    + " Export the model again in this format."
                )
        return {name: found[name] for name in self.weights}

    def check_cache(self, kv: KV) -> None:
        """Raises ConfigError unless the cache has the layout that the graph was made for."""
        got = tuple(tuple(Form.of_block(part) for part in layer) for layer in kv)
        if got != self.caches:
            raise ConfigError(
                f"The graph was exported for a cache of {_cache_form(self.caches)}, not of "
                f"{_cache_form(got)}. Export it with this cache's dtype and block size."
            )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inputs:
        """What `as_dict` has given. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            tuple(tuple(_form(part) for part in layer) for layer in data["caches"]),
            {name: _form(form) for name, form in data["weights"].items()},
            {name: Derived(**made) for name, made in data["derived"].items()},
        )


def _form(data: Mapping[str, Any]) -> Form:
    return Form(str(data["dtype"]), tuple(int(size) for size in data["shape"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cache_form(caches: tuple[tuple[Form, ...], ...]) -> str:
    return f"{len(caches)} layers of " + " and ".join(
        f"{part.dtype} [blocks, {str(list(part.shape))[1:]}" for part in (caches or ((),))[0]
    )

"""`define_op`: schema, reference and shape of an operator in one place.

torch's dispatcher is the only registry. A reference is registered for every backend
(`CompositeExplicitAutograd`); the native library and Triton add their own for a device, and the
dispatcher then prefers those. Nothing else chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from penstock.errors import KernelError

NAMESPACE = "penstock"
F = TypeVar("F", bound=Callable[..., Any])

_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its schema, Python reference, shapes, and the call through the dispatcher."""

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    call: Callable[..., Any]


_ops: dict[str, Op] = {}


def define_op(schema: str, *, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated function as the reference of the operator that `schema` declares.

    schema: torch's schema language, without the namespace: `rms_norm(Tensor x, …) -> Tensor`.
    fake: gives outputs of the right shape and dtype without data, for export and compilation.
    Returns the dispatching call, so that importing the name from `penstock.ops` calls the best
    implementation there is.
    """

    def register(reference: F) -> F:
        name = schema.split("(", 1)[0]
        _library.define(schema)
        _library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        call = getattr(getattr(torch.ops, NAMESPACE), name).default
        _ops[name] = Op(name, schema, reference, fake, call)
        call.__doc__ = reference.__doc__
        return cast(F, call)

    return register


def op(name: str) -> Op:
    """The operator called `name`."""
    if name not in _ops:
        raise KernelError(f"There is no operator {name!r}; known: {', '.join(sorted(_ops))}.")
    return _ops[name]


def op_names() -> list[str]:
    """Every operator's name, sorted."""
    return sorted(_ops)


def has_native(name: str, device: str = "CPU") -> bool:
    """Whether something other than the reference is registered for `device`."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device))


def implementations(name: str) -> dict[str, Callable[..., Any]]:
    """The ways to run an operator on this machine, by name; `reference` is always there."""
    found = {"reference": op(name).reference}
    if has_native(name):
        found["native"] = op(name).call
    return found

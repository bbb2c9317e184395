"""What the lowering and the passes share: nodes of a graph of Penstock's operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from penstock import ops
from penstock.errors import KernelError
from penstock.ops.registry import NAMESPACE


def operator(node: fx.Node) -> str:
    """The operator that `node` calls, without the namespace; empty for inputs and the output.

    Raises KernelError for one that isn't Penstock's: what it reads and writes isn't known here.
    """
    if node.op in ("placeholder", "output"):
        return ""
    target = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        space, _, name = str(target.name()).partition("::")
        if space == NAMESPACE:
            return name
    raise KernelError(
        f"{node.target} isn't one of Penstock's operators, so the graph can't be rewritten. "
        "Export a Decoder."
    )


def calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The nodes that call the operator `name`, in order."""
    return [node for node in graph.nodes if operator(node) == name]


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of the operator by name, defaults included."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in declared), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in declared}


def set_arguments(node: fx.Node, name: str, values: dict[str, Any]) -> None:
    """Make `node` call the operator `name` with these arguments; it keeps its users."""
    node.target = ops.op(name).call
    node.args, node.kwargs = _positional(name, values), {}


def insert(graph: fx.Graph, before: fx.Node, name: str, values: dict[str, Any]) -> fx.Node:
    """A new call of the operator `name`."""
    with graph.inserting_before(before):
        return graph.call_function(ops.op(name).call, _positional(name, values))


def _positional(name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    declared: Any = ops.op(name).call
    schema = declared._schema.arguments
    unknown = values.keys() - {a.name for a in schema}
    if unknown:
        raise KernelError(f"{name} takes no {', '.join(sorted(unknown))}.")
    return tuple(values.get(a.name, a.default_value) for a in schema)


def writes(node: fx.Node) -> list[fx.Node]:
    """The values that `node` writes to."""
    if not operator(node):
        return []
    given = arguments(node)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    changed = (given[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write)
    return [value for value in changed if isinstance(value, fx.Node)]


def is_pure(node: fx.Node) -> bool:
    """Whether `node` does nothing but return a value."""
    return bool(operator(node)) and not writes(node)


def unchanged(values: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing writes to any of `values` after `first` and before `last`.

    Penstock's operators return no views: a value is written only under its own name.
    """
    kept = set(values)
    node = first.next
    while node is not last:
        if kept.intersection(writes(node)):
            return False
        node = node.next
    return True

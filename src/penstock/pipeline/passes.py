"""Passes over a graph: what one operator can do at once is given to one operator.

Each is a function of its own, can be left out, and changes no bit of the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from penstock.errors import ConfigError, nearest
from penstock.pipeline.graph import Graph, settled
from penstock.pipeline.nodes import (
    arguments,
    calls,
    is_pure,
    operator,
    set_arguments,
    unchanged,
)
from penstock.runtime.inputs import Derived
from penstock.runtime.package import quiet

Rewrite = Callable[["_Draft"], int]
PASSES: dict[str, Rewrite] = {}
"""Every pass by name, in the order in which they run; each returns how many places it changed."""


@dataclass(slots=True)
class _Draft:
    """A graph while passes rewrite it."""

    graph: fx.Graph
    weights: dict[str, fx.Node]
    derived: dict[str, Derived]

    @property
    def names(self) -> dict[fx.Node, str]:
        return {node: name for name, node in self.weights.items()}


@dataclass(frozen=True, slots=True)
class Optimized:
    """What passes made of a graph, and the report of it."""

    graph: Graph
    before: list[str]  # operators
    after: list[str]
    changes: dict[str, int]  # pass → places that it changed


def optimize(graph: Graph, passes: Iterable[str] | None = None) -> Optimized:
    """Run `passes` (all, unless named), in the order of PASSES, over a copy of `graph`.

    Raises ConfigError for a name that is no pass.
    """
    chosen = list(PASSES) if passes is None else list(passes)
    check_passes(chosen)
    with quiet():
        work = Graph(copy.deepcopy(graph.program), dict(graph.derived))
    draft = _Draft(work.module.graph, work.nodes[2], work.derived)
    changes = {name: rewrite(draft) for name, rewrite in PASSES.items() if name in chosen}
    after = settled(work)
    return Optimized(after, graph.operators(), after.operators(), changes)


def check_passes(names: Iterable[str]) -> None:
    """Raises ConfigError for a name that is no pass."""
    for name in names:
        if name not in PASSES:
            raise ConfigError(
                f"{name!r} isn't a pass; there are {', '.join(PASSES)}.{nearest(name, PASSES)}"
            )


def _pass(name: str) -> Callable[[Rewrite], Rewrite]:
    def register(rewrite: Rewrite) -> Rewrite:
        PASSES[name] = rewrite
        return rewrite

    return register


@_pass("fuse-norm-linear")
def _fuse_norm(draft: _Draft) -> int:
    """rms_norm, linear → linear: rows are normalised as they are read."""
    count = 0
    for node in calls(draft.graph, "linear"):
        given = arguments(node)
        norm = given["x"]
        if given["norm"] is not None or operator(norm) != "rms_norm" or len(norm.users) != 1:
            continue
        from_norm = arguments(norm)
        if unchanged([norm, from_norm["x"]], norm, node):
            taken = {"x": from_norm["x"], "norm": from_norm["weight"], "eps": from_norm["eps"]}
            set_arguments(node, "linear", {**given, **taken})
            draft.graph.erase_node(norm)
            count += 1
    return count


@_pass("fuse-activation")
def _fuse_activation(draft: _Draft) -> int:
    """linear, gate → linear: columns are activated, and gated, before they are stored."""
    count = 0
    for node in calls(draft.graph, "gate"):
        given = arguments(node)
        product = given.pop("x")
        if operator(product) != "linear" or len(product.users) != 1:
            continue
        linear = arguments(product)
        if linear["activation"] or linear["gated"] or linear["out_dtype"] is not None:
            continue
        if not unchanged([product, linear["x"]], product, node):
            continue
        bias = linear["bias"]
        if given["gated"] and bias is not None:
            if operator(bias) != "alternate":
                continue
            bias = arguments(bias)["bias"]
        set_arguments(node, "linear", {**linear, **given, "bias": bias})
        draft.graph.erase_node(product)
        count += 1
    return count


@_pass("fuse-residual")
def _fuse_residual(draft: _Draft) -> int:
    """linear, add_ → linear_add_: columns are added to the residual stream as they come."""
    count = 0
    for node in calls(draft.graph, "add_"):
        residual, product = node.args
        assert isinstance(residual, fx.Node) and isinstance(product, fx.Node)
        if operator(product) != "linear" or len(product.users) != 1:
            continue
        linear = arguments(product)
        alone = linear["norm"] is None and not linear["activation"] and linear["out_dtype"] is None
        if linear["x"] is residual:  # rows would change while others are still to be read
            continue
        if not alone or not unchanged([product, linear["x"]], product, node):
            continue
        before_and_after = {"out_features", "norm", "eps", "activation", "gated", "out_dtype"}
        kept = {n: value for n, value in linear.items() if n not in before_and_after}
        given = {"residual": residual, **kept}
        set_arguments(node, "linear_add_", given)
        draft.graph.erase_node(product)
        count += 1
    return count


@_pass("fold-constants")
def _fold_constants(draft: _Draft) -> int:
    """What depends on weights alone is computed once, when an engine is made."""
    count = 0
    for node in list(draft.graph.nodes):
        if not is_pure(node) or not node.users:
            continue
        given, names = arguments(node), draft.names
        nodes = [value for value in given.values() if isinstance(value, fx.Node)]
        if not nodes or any(value not in names for value in nodes):
            continue
        name = f"{names[nodes[0]]}.{operator(node)}"
        stored: dict[str, Any] = {
            key: {"weight": names[value]} if isinstance(value, fx.Node) else value
            for key, value in given.items()
        }
        draft.derived[name] = Derived(operator(node), stored)
        last = list(draft.weights.values())[-1]
        with draft.graph.inserting_after(last):
            placed = draft.graph.placeholder(f"weights_{name.replace('.', '_')}")
        placed.meta["val"] = node.meta["val"]
        draft.weights[name] = placed
        node.replace_all_uses_with(placed)
        draft.graph.erase_node(node)
        count += 1
    return count


@_pass("dead-code")
def _dead_code(draft: _Draft) -> int:
    """Operators whose result nobody reads, and weights that no operator takes."""
    count = 0
    for node in reversed(list(draft.graph.nodes)):
        if is_pure(node) and not node.users:
            draft.graph.erase_node(node)
            count += 1
    for name, node in list(draft.weights.items()):
        if not node.users:
            draft.graph.erase_node(node)
            del draft.weights[name]
            draft.derived.pop(name, None)
            count += 1
    return count

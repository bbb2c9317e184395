"""The plain form of a graph: one operator for one thing.

A decoder calls fused operators. What is exported says what is computed, not how: a norm, a
product, a gate and an addition are operators of their own, and `passes` puts together what the
target can do at once. What a fused operator takes along is rounded as if it had been stored, so
both forms give the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from penstock.ops.panels import COLUMNS, round_up
from penstock.pipeline.nodes import arguments, calls, insert, set_arguments


def to_plain(graph: fx.Graph) -> None:
    """Take every fused operator apart, in place."""
    for node in calls(graph, "linear_add_"):
        _split_residual(graph, node)
    for node in calls(graph, "linear"):
        _split_norm(graph, node)
        _split_activation(graph, node)


def _split_residual(graph: fx.Graph, node: fx.Node) -> None:
    """linear_add_ → linear, add_."""
    given = arguments(node)
    residual = given.pop("residual")
    width = residual.meta["val"].shape[1]
    product = insert(graph, node, "linear", {**given, "out_features": width})
    set_arguments(node, "add_", {"residual": residual, "x": product})


def _split_norm(graph: fx.Graph, node: fx.Node) -> None:
    """linear with a norm → rms_norm, linear."""
    given = arguments(node)
    if given["norm"] is None:
        return
    norm = {"x": given["x"], "weight": given["norm"], "eps": given["eps"]}
    rows = insert(graph, node, "rms_norm", norm)
    set_arguments(node, "linear", {**given, "x": rows, "norm": None, "eps": 0.0})


def _split_activation(graph: fx.Graph, node: fx.Node) -> None:
    """linear with an activation → linear, gate.

    gate's and up's panels alternate in a gated matrix, and so do their columns in its plain
    product: that is how `gate` reads them, and how the bias must lie.
    """
    given: dict[str, Any] = arguments(node)
    if not given["activation"]:
        return
    out = {
        "activation": given["activation"],
        "gated": given["gated"],
        "out_features": given["out_features"],
        "out_dtype": given["out_dtype"],
    }
    width = given["out_features"]
    bias = given["bias"]
    if given["gated"]:
        width = 2 * round_up(width, COLUMNS)
        if bias is not None:
            bias = insert(graph, node, "alternate", {"bias": bias})
    alone = {"activation": 0, "gated": False, "out_dtype": None}
    product = insert(graph, node, "linear", {**given, **alone, "bias": bias, "out_features": width})
    set_arguments(node, "gate", {"x": product, **out})

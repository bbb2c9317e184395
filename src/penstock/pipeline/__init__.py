"""From a model to what runs it elsewhere: the graph, its passes, packages, and the commands."""

from penstock.pipeline.graph import Graph, export_graph, load_graph
from penstock.pipeline.passes import PASSES, Optimized, optimize

__all__ = ["PASSES", "Graph", "Optimized", "export_graph", "load_graph", "optimize"]

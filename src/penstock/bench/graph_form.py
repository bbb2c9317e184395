"""A model run by its exported graph, or by that compiled: forms that only drift asks for."""

from __future__ import annotations

from dataclasses import replace

from penstock.hardware import cache_folder
from penstock.pipeline.compiled import compile_graph
from penstock.pipeline.graph import export_graph, weights_of
from penstock.pipeline.passes import optimize
from penstock.runtime import Runtime
from penstock.runtime.loader import runner_over
from penstock.runtime.package import PackageForward
from penstock.runtime.runner import Forward


def by_graph(runtime: Runtime, form: str) -> Runtime:
    """`runtime` with its steps run by its model's graph.

    form: `graph`, in plain form, operators one by one; `compiled`, after all passes, as a package
    that is kept for the next time.
    """
    decoder, kv = runtime.model.model, runtime.runner.kv
    graph = export_graph(decoder, runtime.layout.allocate(2))
    forward: Forward = graph.bind(weights_of(decoder))
    if form == "compiled":
        package = compile_graph(optimize(graph).graph, cache_folder() / "packages")
        forward = PackageForward(package, weights_of(decoder))
    runner = runner_over(forward, kv, runtime.layout, runtime.runner.vocabulary)
    return replace(runtime, runner=runner)

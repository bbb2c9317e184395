"""From a loaded model to the plan of its step: graph, passes, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cache import PagedLayout
from penstock.models.exported import read_exported
from penstock.models.load import LoadedModel
from penstock.pipeline.graph import Graph, export_graph, weights_of
from penstock.pipeline.passes import optimize
from penstock.runtime.plan import Plan, record


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what passes made of the graph that it comes from."""

    plan: Plan
    graph: Graph  # after the passes
    source: str  # of the graph: that of the export, or exported now
    changes: dict[str, int]  # pass → places that it changed
    before: dict[str, int]  # operator → how many
    after: dict[str, int]


def plan_step(
    loaded: LoadedModel, layout: PagedLayout, folder: Path, passes: Sequence[str] | None
) -> Planned:
    """The plan of the model in `folder`, whose tensors may be without data.

    passes: names of those to run; None: all. The graph is exported here: that of an export lies in
    a file whose reader would run what somebody put there. Its digest tells whether it is the same.
    Raises ConfigError for a name that is no pass.
    """
    kv = layout.allocate(2)
    graph = export_graph(loaded.model, kv)
    exported = read_exported(folder)
    same = exported is not None and exported.graph["digest"] == graph.digest
    source = "that of the export" if same else "exported now"
    found = optimize(graph, passes)
    forward = found.graph.bind(weights_of(loaded.model))
    plan, _ = record(forward, kv, forward.bound)
    before, after = (dict(Counter(names)) for names in (found.before, found.after))
    return Planned(plan, found.graph, source, found.changes, before, after)

"""From a loaded model to the plan of its step: graph, passes, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cache import PagedLayout
from penstock.models.exported import read_exported
from penstock.models.load import LoadedModel
from penstock.pipeline.graph import Graph, export_graph, load_graph, weights_of
from penstock.pipeline.passes import optimize
from penstock.runtime.plan import Plan, record


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what passes made of the graph that it comes from."""

    plan: Plan
    source: str  # of the graph: the export's own, or exported now
    changes: dict[str, int]  # pass → places that it changed
    before: dict[str, int]  # operator → how many
    after: dict[str, int]


def plan_step(
    loaded: LoadedModel, layout: PagedLayout, folder: Path, passes: Sequence[str] | None
) -> Planned:
    """The plan of the model in `folder`, whose tensors may be without data.

    passes: names of those to run; None: all. An export's own graph is taken where it is of these
    formats and this cache, else one is exported here.
    Raises ConfigError for a name that is no pass.
    """
    kv = layout.allocate(2)
    graph = _of_export(loaded, layout, folder)
    source = "graph of the export"
    if graph is None:
        graph, source = export_graph(loaded.model, kv), "exported now"
    found = optimize(graph, passes)
    forward = found.graph.bind(weights_of(loaded.model))
    plan, _ = record(forward, kv, forward.bound)
    before, after = (dict(Counter(names)) for names in (found.before, found.after))
    return Planned(plan, source, found.changes, before, after)


def _of_export(loaded: LoadedModel, layout: PagedLayout, folder: Path) -> Graph | None:
    exported = read_exported(folder)
    if exported is None:
        return None
    about = exported.graph
    same = (
        about["formats"] == loaded.model.formats.name
        and about["block_size"] == layout.block_size
        and about["cache"] == layout.stored
    )
    if not same:
        return None
    graph = load_graph(folder / str(about["file"]))
    return graph if graph.digest == about["digest"] else None

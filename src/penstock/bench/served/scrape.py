"""A server's metrics at two moments, and what happened between them.

Names are vLLM's and Penstock's own (`server/metrics.py`), in Prometheus' text format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.errors import ConfigError, MissingExtraError, get_extra


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: how many values are at most each edge."""

    edges: tuple[float, ...] = ()  # ascending; the last is infinite
    counts: tuple[float, ...] = ()  # cumulative
    total: float = 0.0  # of all values

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that `share` of all don't pass; between two edges as if values were spread
        evenly, beyond the last finite one that edge: so Prometheus has it.
        """
        wanted, before, low = share * self.count, 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=True):
            if count >= wanted and count > before:
                if edge == float("inf"):
                    return low
                return low + (edge - low) * (wanted - before) / (count - before)
            before, low = count, edge
        return low

    def told(self, share: float, words: Callable[[float], str]) -> str:
        """`quantile` in words: beyond the last finite edge nobody knows how far."""
        found = self.quantile(share)
        beyond = len(self.edges) > 1 and self.counts[-2] < share * self.count
        return f"more than {words(found)}" if beyond else words(found)


@dataclass(frozen=True, slots=True)
class Sample:
    """All metrics of one model at one moment, engines added up."""

    at: float  # seconds, by the reader's clock
    values: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.values

    def each(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """What is called `name` and has these labels."""
        for found, value in self.values.get(name, ()):
            if all(found.get(label) == wanted for label, wanted in labels.items()):
                yield found, value

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.each(name, **labels))

    def most(self, name: str, **labels: str) -> float:
        return max((value for _, value in self.each(name, **labels)), default=0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """What happened between two samples; from the server's start where there is no earlier one."""

    first: Sample | None
    last: Sample
    begin: Sample  # the first that was taken, for what is compared whatever is counted

    def _grown(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """How far each counter of a name went; one that fell was begun anew (as in Prometheus)."""
        before = {}
        if self.first is not None:
            before = {tuple(sorted(of.items())): x for of, x in self.first.each(name, **labels)}
        for of, value in self.last.each(name, **labels):
            earlier = before.get(tuple(sorted(of.items())), 0.0)
            yield of, value - earlier if value >= earlier else value

    def count(self, name: str, **labels: str) -> float:
        """How far a counter went. Prometheus' clients add `_total` to its name."""
        name = name if name.endswith("_total") else f"{name}_total"
        return sum(grown for _, grown in self._grown(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The same by what a label says."""
        found: dict[str, float] = {}
        for of, grown in self._grown(f"{name}_total", **labels):
            found[of.get(label, "")] = found.get(of.get(label, ""), 0.0) + grown
        return {kind: count for kind, count in sorted(found.items()) if count > 0}

    def distribution(self, name: str) -> Distribution:
        counts: dict[float, float] = {}
        for of, grown in self._grown(f"{name}_bucket"):
            if "le" in of:
                edge = float(of["le"])
                counts[edge] = counts.get(edge, 0.0) + grown
        edges = tuple(sorted(counts))
        total = sum(grown for _, grown in self._grown(f"{name}_sum"))
        return Distribution(edges, tuple(counts[edge] for edge in edges), total)

    def gauge(self, name: str, **labels: str) -> float:
        """The most that one engine had at either end."""
        return max(sample.most(name, **labels) for sample in (self.begin, self.last))


def parse(text: str, at: float, model: str | None) -> Sample:
    """The metrics of `model`, and those of no model. Raises ConfigError for what isn't any, and
    MissingExtraError without a parser.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise MissingExtraError(
            f"Reading /metrics needs prometheus_client; {get_extra('server')}."
        ) from error
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                if model is None or one.labels.get("model_name", model) == model:
                    values.setdefault(one.name, []).append((one.labels, one.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"/metrics isn't in Prometheus' text format: {error}.") from error
    return Sample(at, values)


def models_in(text: str) -> list[str]:
    """The models that metrics are of."""
    found: dict[str, None] = {}
    for each in parse(text, 0.0, None).values.values():
        for labels, _ in each:
            if labels.get("model_name"):
                found[labels["model_name"]] = None
    return list(found)

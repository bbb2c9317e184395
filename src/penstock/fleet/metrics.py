"""`/metrics` of a fleet: its own, and those of its instances, told apart by the label `engine`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.http1 import ExchangeError
from penstock.server.errors import ApiError
from penstock.server.metrics import rejection_reason

if TYPE_CHECKING:
    from penstock.fleet.fleet import Fleet
    from penstock.fleet.worker import Worker

_SCRAPE_TIMEOUT_S = 5.0
_OF_ENGINES = ("vllm:", "penstock:")
_STATES = ("starting", "ready", "unready", "stopping", "failed")


class FleetMetrics:
    """Counters of what the fleet did, and gauges of what it is."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(_State(fleet))

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, labels, registry=self._registry)

        self._answers = counter(
            "penstock_fleet:http_requests",
            "HTTP requests that were answered, by route and status; 499 where the client left.",
            "endpoint", "status",
        )  # fmt: skip
        self._rejections = counter(
            "penstock_fleet:request_rejections",
            "HTTP requests that were answered with an error of the client's or 503, by why.",
            "reason",
        )
        self._asked = counter(
            "penstock_fleet:worker_requests",
            "Requests that an instance was sent, by its answer's status; broken: there was no "
            "whole one.",
            "model_name", "worker", "outcome",
        )  # fmt: skip
        self._continued = counter(
            "penstock_fleet:continued_streams",
            "Answers that broke off and were gone on with by another instance.",
            "model_name",
        )

        self._prefills = counter(
            "penstock_fleet:prefills",
            "Prompts that an instance was asked to compute for another, by its answer's status.",
            "model_name",
            "outcome",
        )

    def answered(self, endpoint: str, status: int, error: ApiError | None) -> None:
        """Count an HTTP request. endpoint: its route, as declared; error: what it was told."""
        self._answers.labels(endpoint, str(status)).inc()
        reason = None if error is None else rejection_reason(error)
        if reason is not None:
            self._rejections.labels(reason).inc()

    def asked(self, model: str, worker: str, outcome: str) -> None:
        """Count what became of a request to an instance."""
        self._asked.labels(model, worker, outcome).inc()

    def prefilled(self, model: str, outcome: str) -> None:
        """Count a prompt that was to be computed for another instance."""
        self._prefills.labels(model, outcome).inc()

    def continued(self, model: str) -> None:
        """Count an answer that another instance goes on with."""
        self._continued.labels(model).inc()

    async def text(self) -> bytes:
        """Prometheus' text format. Instances that don't answer in time are left out."""
        workers = [x for group in self._fleet.everyone for x in group.ready]
        found = await asyncio.gather(*map(_metrics_of, workers))
        registry = CollectorRegistry()
        registry.register(_Engines(workers, found))
        return generate_latest(self._registry) + generate_latest(registry)


async def _metrics_of(worker: Worker) -> str:
    try:
        status, body = await worker.link.read("/metrics", _SCRAPE_TIMEOUT_S)
    except ExchangeError:
        return ""
    return body.decode(errors="replace") if status == 200 else ""


class _Engines(Collector):
    """The metrics of several instances as one server's with several engines, as vLLM has it."""

    def __init__(self, workers: Sequence[Worker], texts: Sequence[str]) -> None:
        self._found = list(zip(workers, texts, strict=True))

    def collect(self) -> Iterator[Metric]:
        """Families of all of them, each once."""
        merged: dict[str, Metric] = {}
        for worker, text in self._found:
            number = worker.name.rpartition("/")[2]
            for family in text_string_to_metric_families(text):
                if not family.name.startswith(_OF_ENGINES):
                    continue
                into = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for x in family.samples:
                    into.samples.append(x._replace(labels=x.labels | {"engine": number}))
        yield from merged.values()


class _State(Collector):
    """What the fleet is now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Read it."""
        groups = list(self._fleet.groups.values())
        demand = GaugeMetricFamily(
            "penstock_fleet:demand",
            "Sequences that haven't been computed over what the ready instances can do at once.",
            labels=["model_name"],
        )
        wanted = GaugeMetricFamily(
            "penstock_fleet:instances_wanted",
            "Instances at which demand would be what it should: an autoscaler's signal, not "
            "bounded by how many this fleet may start.",
            labels=["model_name"],
        )
        instances = GaugeMetricFamily(
            "penstock_fleet:instances", "Instances, by state.", labels=["model_name", "state"]
        )
        outstanding = GaugeMetricFamily(
            "penstock_fleet:outstanding",
            "Sequences of requests that an instance hasn't answered.",
            labels=["model_name", "worker"],
        )
        for group in groups:
            if not math.isinf(group.demand):
                demand.add_metric([group.name], group.demand)
            wanted.add_metric([group.name], group.wanted)
            for state in _STATES:
                count = sum(worker.state == state for worker in group.workers)
                instances.add_metric([group.name, state], count)
        for group in self._fleet.everyone:
            for worker in group.workers:
                outstanding.add_metric([group.name, worker.name], worker.outstanding)
        yield from (demand, wanted, instances, outstanding)

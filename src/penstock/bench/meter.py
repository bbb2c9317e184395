"""An engine whose every step is kept, to be held against the least time this machine allows."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput
from penstock.hardware import AnyPeaks, Compute
from penstock.roofline import StepRecord, Totals, floor_of
from penstock.runtime import Runtime


class Meter:
    """Drives an engine of its own on `runtime`, keeping what its ledger records."""

    def __init__(self, config: EngineConfig, runtime: Runtime) -> None:
        self.runtime = runtime
        self.engine = Engine(config, runtime)
        self.records: list[StepRecord] = []
        self.engine.ledger.watch = self._keep

    def _keep(self, record: StepRecord) -> None:
        self.records.append(record)

    @property
    def weight_format(self) -> str:
        """How the matrices are stored; the head too, where it is stored otherwise."""
        return self.runtime.model.model.formats.name

    @property
    def compute(self) -> Compute:
        """What the products of its matrices run in."""
        return self.runtime.model.model.formats.matrix.compute

    def step(self) -> list[RequestOutput]:
        """One step of the engine."""
        return self.engine.step()

    def take(self) -> list[StepRecord]:
        """The records so far, which are forgotten."""
        records, self.records = self.records, []
        return records

    def phase(self, records: Iterable[StepRecord], peaks: AnyPeaks) -> Totals:
        """`records` added up, held against `peaks`: those known now, not when they ran."""
        found = Totals()
        for record in records:
            found.add(record, floor_of(record.cost, peaks))
        return found

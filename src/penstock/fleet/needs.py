"""What Ray is to reserve for an instance, and whether nodes have it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ConfigError

CPU, GPU = "CPU", "GPU"
_OWN_FIELDS = {CPU: "num_cpus", GPU: "num_gpus"}
_RAYS_OWN = ("memory", "object_store_memory")
_MAX_CPUS = 4096
_TOLD_NODES = 8


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster: what it has, and what of that nobody has reserved."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Needs:
    """What one instance has for itself, in Ray's terms."""

    num_cpus: int = 1  # also its threads
    num_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)  # of the cluster's own naming

    def __post_init__(self) -> None:
        if not 1 <= self.num_cpus <= _MAX_CPUS:
            raise ConfigError(f"num_cpus is {self.num_cpus}; it must be 1 to {_MAX_CPUS}.")
        if not 0 <= self.num_gpus <= _MAX_CPUS:
            raise ConfigError(f"num_gpus is {self.num_gpus}; it must be 0 to {_MAX_CPUS}.")
        for name, amount in self.resources.items():
            if name in _OWN_FIELDS or name in _RAYS_OWN or not name:
                told = _OWN_FIELDS.get(name)
                way_out = f"give {told}" if told else "give one that nodes were started with"
                raise ConfigError(f"resources has {name!r}; {way_out}.")
            usable = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not usable or not 0 < amount < math.inf:
                raise ConfigError(f"resources: {name} is {amount!r}; it must be a number above 0.")

    @property
    def wanted(self) -> dict[str, float]:
        """By Ray's names."""
        own = {CPU: float(self.num_cpus)} | ({GPU: float(self.num_gpus)} if self.num_gpus else {})
        return own | dict(self.resources)

    def lack(self, nodes: Sequence[Node]) -> str:
        """What is wanted and what there is, where no node has it all free; else nothing."""
        wanted = self.wanted
        if any(_fits(wanted, node.free) for node in nodes):
            return ""
        nodes = [x for x in nodes if any(map(x.total.get, wanted))] or nodes
        listed = [f"{_told(wanted, node)} on {node.address}" for node in nodes[:_TOLD_NODES]]
        more = [f"{len(nodes) - _TOLD_NODES} nodes more"] if len(nodes) > _TOLD_NODES else []
        never = "" if any(_fits(wanted, node.total) for node in nodes) else (
            " No node is large enough."
        )  # fmt: skip
        return (
            f"It waits for what Ray is to reserve: {_amounts(wanted)}. Free: "
            f"{'; '.join(listed + more) or 'nothing, there is no node'}.{never}"
        )


def _fits(wanted: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in wanted.items())


def _amounts(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())


def _told(wanted: Mapping[str, float], node: Node) -> str:
    return ", ".join(
        f"{name} {node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g}" for name in wanted
    )

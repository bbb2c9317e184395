"""One rank's part of a model that several processes compute together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.cache import PagedLayout
from penstock.config import EngineConfig
from penstock.hardware import release_freed_memory
from penstock.models.load import LoadedModel
from penstock.parallel import Ranks, Ring
from penstock.runtime.device import CPU
from penstock.runtime.forwards import forward_of
from penstock.runtime.loader import load_weights_of, runner_over
from penstock.runtime.runner import Runner
from penstock.runtime.sizing import layout_of


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """Its weights, and how its part of the cache lies in memory."""

    loaded: LoadedModel
    layout: PagedLayout
    config: EngineConfig

    @property
    def most_blocks(self) -> int:
        """Blocks of its part of the cache that this machine has room for, and one that is empty."""
        room = int(CPU.available_bytes * self.config.cache.memory_fraction)
        return room // self.layout.bytes_per_block - 1

    def runner(self, num_blocks: int) -> Runner:
        """What runs its part of steps, over a new cache of so many blocks."""
        kv = self.layout.allocate(num_blocks)
        forward = forward_of(self.loaded.model, kv, self.config.model.enforce_eager)
        model = self.loaded.model
        part = None if model.ring is None else model.own_part
        return runner_over(forward, kv, self.layout, part=part)


def load_part(folder: Path, config: EngineConfig, ranks: Ranks | Ring) -> LoadedPart:
    """What this rank has of a folder's model; config: as the first rank runs it."""
    loaded = load_weights_of(folder, config.model, CPU, ranks=ranks)
    release_freed_memory()  # as packing leaves it
    layout = layout_of(config, loaded, layers=loaded.model.cached_layers)
    return LoadedPart(loaded, layout, config)

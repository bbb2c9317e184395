"""What guesses beside the target, in two steps: opened before the cache has a size, then placed.

Opening loads the weights, so that the plan of memory knows what is left; it says which states of
the target it reads, if any, before the target's forward is recorded. Placing gives it its own part
of each block, where it has a cache. `loader` does both, `drafting` makes the proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from penstock.cache import PagedLayout
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.models.hub import companions, resolve, shipped
from penstock.models.load import LoadedModel
from penstock.nn import KeptStates
from penstock.quant import Storage
from penstock.runtime.companion import CompanionCache
from penstock.runtime.device import CPU, Device
from penstock.runtime.engine_folder import EngineFolder
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.speculate import Proposer
from penstock.speculate.draft_loop import DraftLimits
from penstock.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is guessed for, as far as it is loaded."""

    folder: Path
    loaded: LoadedModel
    tokenizer: Tokenizer | None
    vocabulary: ReducedVocabulary | None
    engine: EngineFolder | None = None  # what it was loaded from, where that was built
    device: Device = CPU

    def storage(self, config: EngineConfig) -> Storage:
        """How the weights lie that guess for it: as its own."""
        return self.device.storage(ordered=config.model.deterministic is not False)


class Placed(Protocol):
    """One that can guess."""

    @property
    def asked(self) -> SpeculativeConfig:
        """What it was loaded for, num_speculative_tokens filled in."""
        ...

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """Of its own part of each block; none where it has no cache."""
        ...

    @property
    def companions(self) -> tuple[CompanionCache, ...]:
        """What moves with the target's blocks."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of weights that are its own."""
        ...

    def proposer(self, asked: SpeculativeConfig, limits: DraftLimits) -> Proposer:
        """A fresh one, for one engine. asked: of that engine, with this model and quantization;
        limits: the engine's, max_model_len the target's.
        """
        ...


class Opened(Protocol):
    """One whose weights are loaded."""

    @property
    def asked(self) -> SpeculativeConfig:
        """What it was loaded for, num_speculative_tokens filled in."""
        ...

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """Of its own part of each block; none where it has no cache."""
        ...

    @property
    def later_bytes(self) -> int:
        """Of memory that counts as free and will be needed: mapped weights, stores of states."""
        ...

    def described(self, num_blocks: int) -> str:
        """Its part of the line that says what is loaded."""
        ...

    def place(self, num_blocks: int, eager: bool) -> Placed:
        """It over caches of that many blocks; after the target's forward was made."""
        ...


Opener = Callable[[EngineConfig, Target], Opened]
"""Raises ConfigError for what doesn't go with the target."""


def guessing_folder(asked: SpeculativeConfig, target: Target, also: Iterable[str] = ()) -> Path:
    """Where the weights of who guesses are: `asked.model`, or what is shipped with the target.

    also: of a hub's repository, the files that are fetched beside those of a model.
    """
    assert asked.method is not None  # checked
    if asked.model is not None:
        return resolve(asked.model, asked.revision, also=also, offered=companions(asked.method))
    return shipped(target.folder, asked.method)


def keep_states(config: EngineConfig, target: Target, layers: tuple[int, ...]) -> KeptStates:
    """Have the target keep what `layers` read, in room for the largest step of `config`.

    Raises ConfigError for a compiled package, which gives nothing but logits.
    """
    engine, decoder = target.engine, target.loaded.model
    if engine is not None and engine.forward == "package" and not config.model.enforce_eager:
        assert config.speculative is not None
        raise ConfigError(
            f"method={config.speculative.method!r} reads states inside the target, and the "
            f"compiled package of {engine.folder} gives its logits only. Build the engine with "
            "--forward program, or set enforce_eager=True."
        )
    rows = config.scheduler.max_num_batched_tokens  # drafts, trees too, are cut to fit in
    width = len(layers) * decoder.spec.hidden
    store = torch.zeros((rows, width), dtype=decoder.dtype, device=target.device.torch)
    decoder.kept = KeptStates(layers, store)
    return decoder.kept


def bytes_of(module: nn.Module) -> int:
    """Of all that a module holds; what is shared counts once."""
    held = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in held.values())

"""From a configuration to who guesses."""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.errors import ConfigError
from penstock.runtime import Runtime
from penstock.speculate import Proposer


def proposer_of(asked: SpeculativeConfig, runtime: Runtime) -> Proposer:
    """The proposer of a method, over what it needs of the runtime."""
    raise ConfigError(f"{asked.method} {runtime.vocab_size}")

"""From a configuration to who guesses."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.runtime import Runtime
from penstock.runtime.drafting import draft_proposer
from penstock.speculate import Proposer


def proposer_of(config: EngineConfig, runtime: Runtime) -> Proposer:
    """The proposer of a configuration that asks for one.

    Raises ConfigError for what this model, or this cache, can't do.
    """
    asked = config.speculative
    assert asked is not None  # the caller looked
    found = draft_proposer(config, runtime)
    assert found is not None
    return found

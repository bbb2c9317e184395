"""Loading a model for a command: a line on stderr while somebody watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.progress import progress_line

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.runtime import Runtime


def load(config: EngineConfig) -> Runtime:
    """Everything an engine runs on."""
    from penstock.runtime import load_runtime

    words = f"loading {config.model.model}"
    with progress_line() as show:
        show(words, 0, 0)
        return load_runtime(config, lambda done, total: show(words, done, total))

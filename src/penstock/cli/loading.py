"""Loading a model for a command: a bar on stderr while somebody watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli import console

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.runtime import Runtime


def load(config: EngineConfig) -> Runtime:
    """Everything an engine runs on."""
    from penstock.runtime import load_runtime

    if not console.is_terminal():
        return load_runtime(config)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    with bars:
        task = bars.add_task(f"Loading {console.one_line(config.model.model)}", total=None)
        return load_runtime(
            config, lambda done, total: bars.update(task, completed=done, total=total)
        )

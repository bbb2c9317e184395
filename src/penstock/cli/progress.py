"""How far a long command has come: one line on stderr, rewritten while somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli import console

Show = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and all of it: 0 where nobody counts."""

_ESTIMATE_S = 3600.0
"""The time left follows from the steps of so long: a large model's layer takes minutes."""


@contextmanager
def progress_line() -> Iterator[Show]:
    """Yields what shows a step, its share, the time it took and an estimate of what is left.

    Another total, or a count that doesn't grow, begins another step. Without a terminal nothing is
    shown.
    """
    if not console.is_terminal():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[left]}"),
    )
    line = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=_ESTIMATE_S,
    )
    step = line.add_task("", total=None, left="")

    def show(what: str, done: int, total: int) -> None:
        nonlocal step
        task = line.tasks[0]
        if task.total != (total or None) or done <= task.completed:
            line.remove_task(step)
            step = line.add_task("", total=total or None, left="left" if total else "")
        words = f"{what} {done:,}/{total:,}" if total else what
        line.update(step, description=console.one_line(words), completed=done)

    with line:
        yield show

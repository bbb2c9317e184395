"""How far a run has come: a line that moves on a terminal, or a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from penstock.bench.serve.load import Progress

TERMINAL_S, LINES_S = 0.25, 5.0  # between two words


def describe(progress: Progress, tokens_per_s: float) -> str:
    """`12/200 done, 0 failed, 8 running, 431.2 tok/s`."""
    p = progress
    requests = f"{p.done}/{p.total} done, {p.failed} failed, {p.running} running"
    return f"{requests}, {tokens_per_s:,.1f} tok/s"


class _Speed:
    """Chunks per second since the last time it was asked."""

    def __init__(self) -> None:
        self._tokens, self._at = 0, 0.0

    def of(self, progress: Progress) -> float:
        if progress.elapsed_s < self._at:  # another run has begun
            self._tokens, self._at = 0, 0.0
        passed = progress.elapsed_s - self._at
        speed = (progress.tokens - self._tokens) / passed if passed > 0 else 0.0
        self._tokens, self._at = progress.tokens, progress.elapsed_s
        return speed


@contextmanager
def showing(stream: TextIO, *, watched: bool) -> Iterator[tuple[Callable[[Progress], None], float]]:
    """What shows progress on `stream`, and how often (in seconds) it wants to.

    watched: a terminal that somebody looks at.
    """
    speed = _Speed()
    if not watched:

        def line(progress: Progress) -> None:
            words = describe(progress, speed.of(progress))
            print(f"{progress.elapsed_s:.0f} s: {words}", file=stream, flush=True)

        yield line, LINES_S
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    # drawn when told to: its thread would wake in the middle of what is measured
    bars = Bars(*columns, console=Console(file=stream), transient=True, auto_refresh=False)
    with bars:
        task = bars.add_task("connecting", total=None)

        def move(progress: Progress) -> None:
            bars.update(
                task,
                completed=progress.done + progress.failed,
                total=progress.total,
                description=describe(progress, speed.of(progress)),
                refresh=True,
            )

        yield move, TERMINAL_S

"""Loading a model for a command: a line on stderr while somebody watches."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

from penstock.cli.progress import progress_line

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.runtime import Runtime


_WHILE_LOADING: Final = 200_000
_THRESHOLDS: Final = gc.get_threshold()


def collect_rarely() -> None:
    """Until `settle_heap`, look for garbage once in 200,000 objects.

    Importing torch makes some 300,000 that all stay. By Python's own 700, collections walk them
    again and again: a fifth of the import's time.
    """
    gc.set_threshold(_WHILE_LOADING, *_THRESHOLDS[1:])


def load(config: EngineConfig) -> Runtime:
    """Everything an engine runs on."""
    from penstock.runtime import load_runtime

    words = f"loading {config.model.model}"
    with progress_line() as show:
        show(words, 0, 0)
        runtime = load_runtime(config, lambda done, total: show(words, done, total))
    settle_heap()
    return runtime


def settle_heap() -> None:
    """Leave everything that is there by now out of garbage collections, and have them as usual.

    Modules and a loaded model are some 200,000 objects that stay; each full collection walks all
    of them, and every request waits for it: about 0.1 s. For processes that load one model and end
    with it; a library's caller may want its objects back.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

"""Loading a model for a command: a line on stderr while somebody watches."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli import console
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

    config = _settled(config)
    words = f"loading {config.model.model}"
    with progress_line() as show:
        show(words, 0, 0)
        runtime = load_runtime(config, lambda done, total: show(words, done, total))
    settle_heap()
    return runtime


def _settled(config: EngineConfig) -> EngineConfig:
    """With the projector that lies beside a model in GGUF, which is told."""
    from penstock.models.gguf.container import is_gguf
    from penstock.models.hub import resolve
    from penstock.runtime.projector import projector_of, with_projector

    if config.model.mmproj is not None or not Path(config.model.model).expanduser().exists():
        return config
    folder = resolve(config.model.model, config.model.revision)
    if not is_gguf(folder):
        return config
    config = with_projector(folder, config)
    found = projector_of(config.model)
    if found is not None:
        console.note(f"pictures are read by {found.name}, found beside it (--no-mmproj: not)")
    return config


def settle_heap() -> None:
    """Leave everything that is there by now out of garbage collections, and have them as usual.

    Modules and a loaded model are some 200,000 objects that stay; each full collection walks all
    of them, and every request waits for it: about 0.1 s. For processes that load one model and end
    with it; a library's caller may want its objects back.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

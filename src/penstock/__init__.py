"""Penstock: an LLM inference engine that knows its floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine import (
        LLM,
        AsyncLLM,
        CompletionOutput,
        LoRARequest,
        RequestMetrics,
        RequestOutput,
    )
    from penstock.errors import PenstockError
    from penstock.sampling import (
        BeamSearchParams,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PenstockError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

_SAMPLING = (
    "BeamSearchParams",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
)
_HOMES = {"PenstockError": "penstock.errors", **dict.fromkeys(_SAMPLING, "penstock.sampling")}


def __getattr__(name: str) -> Any:
    """Public names load on first use: `penstock --help` needn't wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import gc
    import importlib
    import sys

    home = _HOMES.get(name, "penstock.engine")
    found = getattr(sys.modules.get(home), name, None)
    if found is not None:  # else the module isn't there, or another thread is at it
        return found
    collects = gc.isenabled()
    gc.disable()  # modules stay: to look for garbage among them took a third of this import
    try:
        return getattr(importlib.import_module(home), name)
    finally:
        if collects:
            if not gc.get_freeze_count():
                # among the oldest right away: else the first collections go through all of them
                gc.freeze()
                gc.unfreeze()
            gc.enable()

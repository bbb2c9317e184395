"""The engine: requests, scheduling, batching, and the Python interface."""

from penstock.engine.async_llm import AsyncLLM
from penstock.engine.engine import Engine
from penstock.engine.llm import LLM
from penstock.engine.options import RequestOptions
from penstock.engine.outputs import (
    CompletionOutput,
    PreemptionRecord,
    RequestMetrics,
    RequestOutput,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Engine",
    "PreemptionRecord",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
]

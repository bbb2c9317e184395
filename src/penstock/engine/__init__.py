"""The engine: requests, scheduling, batching, and the Python interface."""

from penstock.engine.async_llm import AsyncLLM
from penstock.engine.engine import Engine
from penstock.engine.llm import LLM
from penstock.engine.lora import LoRARequest
from penstock.engine.options import Pin, RequestOptions
from penstock.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    PreemptionRecord,
    RequestMetrics,
    RequestOutput,
)
from penstock.engine.pooling import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "LoRARequest",
    "Pin",
    "PoolingParams",
    "PreemptionRecord",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
]

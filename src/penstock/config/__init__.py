"""What a user may choose. Frozen, checked on creation; an unknown name is an error."""

from penstock.config.compilation import CompilationConfig
from penstock.config.engine import EngineConfig
from penstock.config.parts import (
    DEFAULT_CHAT_MODEL,
    DEFAULT_MODEL,
    MEMORY_FRACTION,
    PROMPT_LOGITS,
    STARVATION_S,
    CacheConfig,
    KvCacheDtype,
    ModelConfig,
    SchedulerConfig,
)
from penstock.config.speculative import SpeculativeConfig, SpeculativeMethod

__all__ = [
    "DEFAULT_CHAT_MODEL",
    "DEFAULT_MODEL",
    "MEMORY_FRACTION",
    "PROMPT_LOGITS",
    "STARVATION_S",
    "CacheConfig",
    "CompilationConfig",
    "EngineConfig",
    "KvCacheDtype",
    "ModelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "SpeculativeMethod",
]

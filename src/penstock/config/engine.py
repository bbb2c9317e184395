"""The whole choice, from arguments by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.config.lora import LoraConfig
from penstock.config.parallel import ParallelConfig, guesses_by_layers
from penstock.config.parts import CacheConfig, ModelConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.errors import ConfigError, nearest

# vLLM's names for what is called otherwise, or sits deeper, here
_ALIASES = {
    "compilation_config": "compilation",
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "memory_fraction",
    "scheduling_policy": "policy",
}

_NOTHING: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((None, 1), "several engines are a fleet (penstock fleet)"),
    "trust_remote_code": ((None, False), "no code of a checkpoint is ever run"),
    "tokenizer_mode": ((None, "auto"), "there is one kind of tokenizer for each model"),
    "max_cpu_loras": ((None,), "adapters lie in the memory that they run from: max_loras"),
    "fully_sharded_loras": ((None, False), "adapters and tensor_parallel_size don't go together"),
    "lora_dtype": ((None, "auto"), "adapters are what the model computes in"),
    "prefill_context_parallel_size": ((None, 1), "context_parallel_size is of prompts and answers"),
    "decode_context_parallel_size": ((None, 1), "context_parallel_size is of prompts and answers"),
    "disable_log_stats": ((None, True), "nothing is logged of each step; stats() has it"),
}
"""vLLM's arguments of which Penstock has but one choice: values that ask for it, and why."""


_FOR_ONE = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "stage_addresses",
)  # fmt: skip
"""Of which None is some callers' word for one process."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole choice. `EngineConfig.of(**kwargs)` takes every field of every part by name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the fields that somebody chose, whatever their value."""

    def storing(self, kv_cache_dtype: str) -> EngineConfig:
        """This with keys and values in `kv_cache_dtype`, and what follows from it."""
        caching = self.cache.enable_prefix_caching
        if caching and "enable_prefix_caching" not in self.given:
            caching = None  # nobody asked for it
        stored: Any = kv_cache_dtype
        cache = replace(self.cache, kv_cache_dtype=stored, enable_prefix_caching=caching)
        return replace(self, cache=cache)

    def chose(self, part: object, name: str) -> bool:
        """Whether the field `name` of `part` was chosen, rather than suggested or left out."""
        if self.given:
            return name in self.given
        default = next(f.default for f in fields(part) if f.name == name)  # type: ignore[arg-type]
        return bool(getattr(part, name) != default)

    def suggesting(self, /, **scheduler: Any) -> EngineConfig:
        """The same with these values of the scheduler, of which a built engine may have less."""
        suggested = replace(self, scheduler=replace(self.scheduler, **scheduler))
        suggested.check_together()
        return suggested

    def _check_shared_context(self) -> None:
        """Raises ConfigError for what isn't built where ranks share the tokens of sequences."""
        if self.parallel.context_parallel_size == 1:
            return
        if self.cache.layout == "linear" or self.model.max_attention_window is not None:
            what = "layout='linear'" if self.cache.layout == "linear" else "a max_attention_window"
            raise ConfigError(
                f"{self.parallel.described} isn't built together with {what}. Leave one of them "
                "out."
            )
        if self.cache.block_size != self.parallel.block_size and "block_size" in self.given:
            raise ConfigError(
                f"{self.parallel.described} has blocks of {self.parallel.block_size} tokens, of "
                f"which each rank keeps 256, so block_size={self.cache.block_size} can't take "
                "effect. Leave it out."
            )

    def _check_beside_window(self, method: str | None) -> None:
        """Raises ConfigError for what isn't built where texts are longer than what is seen."""
        asked = {
            "layout='linear'": self.cache.layout == "linear",
            "kv_cache_dtype='kivi'": self.cache.kv_cache_dtype == "kivi",
            f"guesses by {method!r}": method not in (None, "ngram", "suffix", "self"),
        }
        for name, given in asked.items():
            if given:
                raise ConfigError(
                    f"max_attention_window={self.model.max_attention_window} doesn't go with "
                    f"{name}. Leave one of them out."
                )

    @classmethod
    def of(cls, /, **kwargs: Any) -> EngineConfig:
        """Build from flat keyword arguments, in vLLM's names.

        Raises ConfigError naming the nearest known argument for one that isn't known.
        """
        parts: dict[str, type] = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "lora": LoraConfig,
            "parallel": ParallelConfig,
        }
        known = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        speculative = SpeculativeConfig.of(kwargs.pop("speculative_config", None))
        for name, value in kwargs.items():
            real = _ALIASES.get(name, name)
            if value is None and name in _FOR_ONE:
                continue
            if name in _NOTHING:
                _check_nothing(name, value)
                continue
            if real not in known:
                raise ConfigError(
                    f"{name!r} isn't an argument of the engine."
                    f"{nearest(name, [*known, *_ALIASES, 'speculative_config'])}"
                )
            if real in chosen[known[real]]:
                raise ConfigError(f"{name!r} is given twice, once under its other name.")
            chosen[known[real]][real] = value
        config = cls(
            **{part: kind(**chosen[part]) for part, kind in parts.items()},
            speculative=speculative,
            given=frozenset(name for part in chosen.values() for name in part),
        )
        config.check_together()
        whole = config.parallel.block_size
        if whole is not None:
            config = replace(config, cache=replace(config.cache, block_size=whole))
        return config

    def differs_before_engine(self) -> bool:
        """Whether something is chosen that only loading a model or a cache can heed."""
        engine_only = {"seed", "enable_prefix_caching"}
        return any(
            getattr(part, f.name) != f.default
            for part in (self.model, self.cache, self.lora, self.parallel)
            for f in fields(part)
            if f.name not in engine_only
        )

    def check_together(self) -> None:
        """Raises ConfigError where fields of two parts contradict each other."""
        scheduler, length = self.scheduler, self.model.max_model_len
        method = None if self.speculative is None else self.speculative.method
        self.lora.check_method(method)
        if self.cache.layout == "linear" and method not in (None, "ngram", "suffix"):
            raise ConfigError(
                f"layout='linear' doesn't go with guesses by {method!r}, which write to blocks "
                "beside a sequence's own. Use ngram or suffix, or leave it out."
            )
        if self.cache.layout == "linear" and "block_size" in self.given:
            raise ConfigError(
                f"layout='linear' gives each sequence one block for all its tokens, so block_size="
                f"{self.cache.block_size} can't take effect. Leave one of them out."
            )
        self.parallel.check_beside(
            {
                "enable_lora": self.lora.enable_lora,
                f"guesses by {method!r}": guesses_by_layers(method),
                "kv_cache_dtype='kivi'": self.cache.kv_cache_dtype == "kivi",
                "a prefix_cache_dir": self.cache.prefix_cache_dir is not None,
                "load_format='dummy'": self.model.load_format == "dummy",
            }
        )
        self._check_shared_context()
        if self.model.max_attention_window is not None:
            self._check_beside_window(method)
        asked = scheduler.preemption_mode == "swap" or bool(scheduler.swap_space)
        if self.cache.kv_cache_dtype == "kivi" and asked:
            raise ConfigError(
                "kv_cache_dtype='kivi' can't be swapped out: its recent tokens lie in places of "
                "their own. Leave out preemption_mode='swap' and swap_space; who gives way is "
                "computed again."
            )
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) is below "
                f"max_num_seqs ({scheduler.max_num_seqs}): not every sequence could decode in one "
                "step. Raise the first or lower the second."
            )
        if not scheduler.enable_chunked_prefill and length is not None:
            if scheduler.max_num_batched_tokens < length:
                raise ConfigError(
                    f"Without chunked prefill a prompt of max_model_len ({length}) must fit in "
                    f"max_num_batched_tokens ({scheduler.max_num_batched_tokens})."
                )


def _check_nothing(name: str, value: object) -> None:
    """Raises ConfigError for what can't take effect."""
    values, why = _NOTHING[name]
    if not any(value is one or (type(value) is type(one) and value == one) for one in values):
        raise ConfigError(f"{name}={value!r} can't take effect: {why}. Leave it out.")

"""What a user may choose. Frozen, checked on creation; an unknown name is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.errors import ConfigError, nearest

DEFAULT_MODEL = "stories"
"""The model embedded in the package."""

MEMORY_FRACTION = 0.9
"""The default of `CacheConfig.memory_fraction`."""

KvCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3", "int4", "kivi", "bfloat16", "float32"]
"""What keys and values are stored as; bfloat16 and float32 are the activations' own."""

STARVATION_S = 60.0
"""The default of `SchedulerConfig.starvation_s`."""


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, not {value!r}.")


def _flags(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {value!r}.")


def _seconds(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} must be a positive number of seconds, not {value!r}.")


def _one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} isn't one of {', '.join(allowed)}.{nearest(str(value), allowed)}"
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which form."""

    model: str | Path = DEFAULT_MODEL  # a folder, a hub id, or an embedded model's name
    dtype: str = "auto"  # "auto" is the checkpoint's own
    max_model_len: int | None = None  # tokens; None is what the model was made for
    tokenizer: str | Path | None = None  # None: beside the model
    skip_tokenizer_init: bool = False
    revision: str | None = None  # of a hub id
    strict: bool = False  # a config key that nothing reads is an error
    quantization: str | None = None  # of weights as they are loaded: w8a8, w4a8-g64, …
    enforce_eager: bool = False  # call the operators one by one from Python
    verify: bool = False  # an engine folder's weights against their checksums
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "max_model_len")
        _flags(self, "skip_tokenizer_init", "strict", "enforce_eager", "verify")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(
                f"skip_tokenizer_init leaves no use for tokenizer={str(self.tokenizer)!r}. "
                "Give one of them."
            )
        if self.quantization is not None and not isinstance(self.quantization, str):
            raise ConfigError(f"quantization must be a name, not {self.quantization!r}.")
        _one_of(self, "dtype", ("auto", "float32", "float", "bfloat16"))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed must be an integer of at least 0, not {self.seed!r}.")
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(f"model must be a folder, a hub id or a name, not {self.model!r}.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where keys and values live."""

    layout: Literal["paged"] = "paged"
    block_size: int = 32  # tokens
    num_blocks: int | None = None  # None: what can be used, up to 4 GiB or one full sequence
    memory_fraction: float = (
        MEMORY_FRACTION  # never more than this of the memory free after the weights
    )
    enable_prefix_caching: bool | None = None  # None: on, but with kivi, which it can't go with
    # auto: what an export or engine was made with, else that of the activations
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_recent_window: int | None = None  # tokens that kivi keeps in bfloat16; None: 128

    def __post_init__(self) -> None:
        _positive(self, "block_size", "num_blocks")
        _one_of(self, "layout", ("paged",))
        _one_of(self, "kv_cache_dtype", get_args(KvCacheDtype))
        if self.block_size % 32:
            raise ConfigError(f"block_size must be a multiple of 32 tokens, not {self.block_size}.")
        self._check_window()
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise ConfigError(f"memory_fraction must be a number, not {fraction!r}.")
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"memory_fraction must be in (0, 1], not {self.memory_fraction!r}.")
        if self.num_blocks is not None and fraction != MEMORY_FRACTION:
            raise ConfigError(
                f"num_blocks={self.num_blocks} leaves memory_fraction={fraction} (also "
                "gpu_memory_utilization) nothing to decide. Give one of them."
            )

    def _check_window(self) -> None:
        _positive(self, "kv_recent_window")
        kivi = self.kv_cache_dtype == "kivi"
        if self.kv_recent_window is not None and not kivi:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} has no use for "
                f"kv_recent_window={self.kv_recent_window}. Set kv_cache_dtype='kivi', or leave it "
                "out."
            )
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", not kivi)
        _flags(self, "enable_prefix_caching")
        if kivi and self.enable_prefix_caching:
            raise ConfigError(
                "kv_cache_dtype='kivi' can't go with enable_prefix_caching: whoever found a prefix "
                "would need its last tokens in full precision, and of a cached block only its "
                "codes are left. Leave one of them out; kv_cache_dtype='int4' goes with it."
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much runs at once, who goes first, and how one gives way to another."""

    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    enable_chunked_prefill: bool = True
    enable_jump_forward: bool = True  # tokens that a grammar forces take no step of their own
    policy: Literal["fcfs", "priority", "sjf", "edf"] = "fcfs"
    ttft_slo_s: float | None = None  # edf: for requests that don't bring their own
    tpot_slo_s: float | None = None
    starvation_s: float = STARVATION_S  # who has waited longer goes ahead of all who haven't
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"  # auto: what costs less
    swap_space: float | None = None  # GiB; None: 1, or a tenth of the free memory if that is less

    def __post_init__(self) -> None:
        _positive(self, "max_num_seqs", "max_num_batched_tokens")
        _flags(self, "enable_chunked_prefill", "enable_jump_forward")
        _one_of(self, "policy", ("fcfs", "priority", "sjf", "edf"))
        _one_of(self, "preemption_mode", ("auto", "recompute", "swap"))
        _seconds(self, "ttft_slo_s", "tpot_slo_s", "starvation_s")
        if self.starvation_s is None:
            raise ConfigError("starvation_s must be a positive number of seconds, not None.")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            if self.policy != "edf" and getattr(self, name) is not None:
                raise ConfigError(
                    f"policy={self.policy!r} has no use for {name}={getattr(self, name)}. Set "
                    "policy='edf', or leave it out."
                )
        if self.policy == "fcfs" and self.starvation_s != STARVATION_S:
            raise ConfigError(
                f"policy='fcfs' leaves starvation_s={self.starvation_s} nothing to decide: nobody "
                "is overtaken. Leave it out, or choose another policy."
            )
        self._check_swap()

    def _check_swap(self) -> None:
        space = self.swap_space
        if space is None:
            return
        number = isinstance(space, int | float) and not isinstance(space, bool)
        if not number or not math.isfinite(space) or space < 0:
            raise ConfigError(f"swap_space must be a number of GiB, at least 0, not {space!r}.")
        if space == 0 and self.preemption_mode == "swap":
            raise ConfigError(
                "preemption_mode='swap' has nowhere to swap to: swap_space is 0. Give it some GiB, "
                "or set preemption_mode='recompute'."
            )
        if space > 0 and self.preemption_mode == "recompute":
            raise ConfigError(
                f"preemption_mode='recompute' has no use for swap_space={space}. Leave it out, or "
                "set preemption_mode='auto'."
            )


SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "self", "medusa", "eagle", "eagle3"]
"""Who guesses; `speculate/` has a file for each."""

_SPECULATION: dict[str, tuple[int | None, set[str]]] = {
    "ngram": (16, {"prompt_lookup_min", "prompt_lookup_max"}),
    "suffix": (
        16,
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_tokens",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        },
    ),
    "draft_model": (8, {"model", "quantization", "max_model_len"}),
    "self": (6, {"draft_layers"}),
    "medusa": (None, {"model", "quantization", "tree_width", "tree_tokens"}),
    "eagle": (5, {"model", "quantization", "tree_width", "tree_tokens"}),
    "eagle3": (5, {"model", "quantization", "tree_width", "tree_tokens"}),
}
"""Of each method: the default of num_speculative_tokens (None: as many as there are heads), and the
options that it alone reads.
"""

_MOST = {
    "num_speculative_tokens": 1024,
    "prompt_lookup_min": 1024,
    "prompt_lookup_max": 1024,
    "suffix_decoding_max_tree_depth": 1024,
    "suffix_decoding_max_cached_tokens": 100_000_000,
    "tree_width": 64,
    "tree_tokens": 256,
    "suffix_decoding_max_cached_requests": 100_000_000,
    "suffix_decoding_max_spec_factor": 1024,
    "suffix_decoding_min_token_prob": 1,
}
"""What some options may be: beyond it they take time or memory and find nothing more."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are guessed ahead; vLLM's names where it has them."""

    method: SpeculativeMethod | None = None  # None: draft_model where a model is given
    num_speculative_tokens: int | None = None  # the most one after another; None: the method's own
    model: str | Path | None = None  # that guesses: a draft model, or heads; of the same vocabulary
    quantization: str | None = None  # of its weights as they are loaded
    max_model_len: int | None = None  # draft_model: tokens of a sequence that it drafts for
    tree_width: int | None = None  # of heads: guesses that may follow one; 1: no trees; None: 4
    tree_tokens: int | None = None  # guesses in a tree; None: twice num_speculative_tokens
    draft_layers: int | None = None  # self: the first so many guess; None: a quarter
    prompt_lookup_min: int | None = None  # ngram: tokens that must match; None: 2
    prompt_lookup_max: int | None = None  # ngram: tokens that are looked at; None: 16
    suffix_decoding_max_tree_depth: int | None = None  # tokens that are looked at; None: 24
    suffix_decoding_max_cached_tokens: int | None = None  # of past outputs; None: 1,000,000
    suffix_decoding_max_cached_requests: int | None = None  # of past outputs; 0: none are kept
    suffix_decoding_max_spec_factor: float | None = None  # guessed for each that matches; None: 1
    suffix_decoding_min_token_prob: float | None = None  # the least of a whole guess; None: 0.1
    disable_by_batch_size: int | None = None  # no drafts where more sequences than that decode
    draft_tensor_parallel_size: int | None = None  # vLLM's; 1 is all there is
    adaptive: bool = True  # drafts are as long as they are predicted to pay, or there are none

    def __post_init__(self) -> None:
        if self.method is None:
            if self.model is None:
                raise ConfigError(
                    "A speculative_config needs a method: one of "
                    f"{', '.join(get_args(SpeculativeMethod))}."
                )
            object.__setattr__(self, "method", "draft_model")
        _one_of(self, "method", get_args(SpeculativeMethod))
        assert self.method is not None  # checked
        most, own = _SPECULATION[self.method]
        for name in set().union(*(names for _, names in _SPECULATION.values())) - own:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"method={self.method!r} has no use for {name}={getattr(self, name)!r}. Leave "
                    "it out."
                )
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model must be a folder, a hub id or a name, not {self.model!r}.")
        if not isinstance(self.quantization, str | None):
            raise ConfigError(f"quantization must be a name, not {self.quantization!r}.")
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", most)
        _flags(self, "adaptive")
        _positive(
            self,
            "num_speculative_tokens", "draft_layers", "prompt_lookup_min", "prompt_lookup_max",
            "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_tokens",
            "tree_width", "tree_tokens",
            "max_model_len", "disable_by_batch_size", "draft_tensor_parallel_size",
        )  # fmt: skip
        _at_least_zero(self)
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} isn't possible: a "
                "model runs in one process, on all its cores. Leave it out."
            )
        for name, most in _MOST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be {most:,} at most, not {getattr(self, name):,}.")
        self._check_tree()
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ConfigError(f"prompt_lookup_min={low} is above prompt_lookup_max={high}.")

    def _check_tree(self) -> None:
        """Raises ConfigError for a size that would have no effect."""
        depth, most = self.num_speculative_tokens, self.tree_tokens
        if most is None:
            return
        if self.tree_width == 1:
            raise ConfigError(
                f"tree_tokens={most} has no effect with tree_width=1, which makes chains: their "
                "length is num_speculative_tokens. Leave one of them out."
            )
        if depth is not None and most < depth:
            raise ConfigError(
                f"tree_tokens={most} is less than num_speculative_tokens={depth}: a tree so deep "
                "has at least as many guesses. Raise the one or lower the other."
            )

    @property
    def width(self) -> int:
        """Guesses that may follow one another's place: 1 where drafts are no trees."""
        heads = self.method in ("medusa", "eagle", "eagle3")
        return (self.tree_width or 4) if heads else 1

    @property
    def most_tokens(self) -> int:
        """Tokens in a draft, tree or not."""
        depth = self.num_speculative_tokens
        assert depth is not None  # filled in
        return depth if self.width == 1 else max(self.tree_tokens or 2 * depth, depth)

    @classmethod
    def of(cls, value: object) -> SpeculativeConfig | None:
        """From what a caller gave: a dictionary, one of these, or None for no speculation."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config must be a dictionary, not {type(value).__name__}: "
                '{"method": "ngram"} is one.'
            )
        names = [f.name for f in fields(cls)]
        for name in value:
            if name not in names:
                raise ConfigError(
                    f"{name!r} isn't in a speculative_config.{nearest(str(name), names)} It may "
                    f"have {', '.join(names)}."
                )
        return cls(**value)


def _at_least_zero(config: SpeculativeConfig) -> None:
    """Raises ConfigError for what isn't the number that it must be, where it may be 0 or between
    whole ones."""
    for name, kinds in (
        ("suffix_decoding_max_cached_requests", int),
        ("suffix_decoding_max_spec_factor", int | float),
        ("suffix_decoding_min_token_prob", int | float),
    ):
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
            kind = "an integer" if kinds is int else "a number"
            raise ConfigError(f"{name} must be {kind} of at least 0, not {value!r}.")
    if config.suffix_decoding_max_spec_factor == 0:
        raise ConfigError(
            "suffix_decoding_max_spec_factor=0 lets no guess have a token. Leave out the "
            "speculative_config instead."
        )


# vLLM's names for what is called otherwise, or sits deeper, here
_ALIASES = {
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "memory_fraction",
    "scheduling_policy": "policy",
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole choice. `EngineConfig.of(**kwargs)` takes every field of every part by name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None
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

    def suggesting(self, **scheduler: Any) -> EngineConfig:
        """The same with these values of the scheduler, of which a built engine may have less."""
        suggested = replace(self, scheduler=replace(self.scheduler, **scheduler))
        suggested.check_together()
        return suggested

    @classmethod
    def of(cls, **kwargs: Any) -> EngineConfig:
        """Build from flat keyword arguments, in vLLM's names.

        Raises ConfigError naming the nearest known argument for one that isn't known.
        """
        parts: dict[str, type] = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
        }
        known = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        speculative = SpeculativeConfig.of(kwargs.pop("speculative_config", None))
        for name, value in kwargs.items():
            real = _ALIASES.get(name, name)
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
        return config

    def differs_before_engine(self) -> bool:
        """Whether something is chosen that only loading a model or a cache can heed."""
        engine_only = {"seed", "enable_prefix_caching"}
        return any(
            getattr(part, f.name) != f.default
            for part in (self.model, self.cache)
            for f in fields(part)
            if f.name not in engine_only
        )

    def check_together(self) -> None:
        """Raises ConfigError where fields of two parts contradict each other."""
        scheduler, length = self.scheduler, self.model.max_model_len
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

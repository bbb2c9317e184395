"""Which model and how it runs, where keys and values live, how much runs at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.config.checks import choices, flags, one_of, positive, seconds
from penstock.config.compilation import CompilationConfig
from penstock.errors import ConfigError

DEFAULT_MODEL = "stories"
"""The embedded model that goes on with a text."""

DEFAULT_CHAT_MODEL = "stories-chat"
"""The embedded model that replies."""

PROMPT_LOGITS = 256
"""Tokens of prompts in one step whose logits are read, for their log-probabilities. They are
vocabulary-sized rows of float32: 131 MB for 128,256 tokens, and twice that while they are read."""

MEMORY_FRACTION = 0.9
"""The default of `CacheConfig.memory_fraction`."""

KvCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3", "int4", "kivi", "bfloat16", "float32"]
"""What keys and values are stored as; bfloat16 and float32 are the activations' own."""

STARVATION_S = 60.0
"""The default of `SchedulerConfig.starvation_s`."""

_DEVICES = r"auto|cpu|cuda(:(0|[1-9][0-9]?))?"


DISK_SPACE = 10.0
"""The default of `CacheConfig.prefix_cache_disk_space`."""

SINKS = 256
"""The most of `ModelConfig.sink_token_length`: what attention takes in one piece."""

MAX_NUM_BATCHED_TOKENS = 2048
"""Unless asked otherwise."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which form."""

    model: str | Path = DEFAULT_MODEL  # a folder, a hub id, or an embedded model's name
    dtype: str = "auto"  # "auto" is the checkpoint's own
    max_model_len: int | None = None  # tokens; None is what the model was made for
    max_attention_window: int | None = None  # tokens that one sees; None: all
    sink_token_length: int | None = None  # of those, the first of the sequence; None: 4
    tokenizer: str | Path | None = None  # None: beside the model
    skip_tokenizer_init: bool = False
    revision: str | None = None  # of a hub id
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, config.json is enough
    strict: bool = False  # a config key that nothing reads is an error
    quantization: str | None = None  # of weights as they are loaded: w8a8, w4a8-g64, …
    device: str = "auto"  # cpu, cuda or cuda:N; auto: a GPU where one can be used, else the CPU
    deterministic: bool | None = None  # one order of additions for any batch; None: where it's fast
    enforce_eager: bool = False  # call the operators one by one from Python
    nvtx: bool = False  # names on a GPU's timeline for what the engine does, for Nsight Systems
    compilation: CompilationConfig | None = None  # of a GPU's steps; None: graphs of decoding ones
    verify: bool = False  # an engine folder's weights against their checksums
    seed: int = 0
    mm_processor_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    """How pictures are cut, in place of what the model's processor says of these keys."""
    mmproj: str | Path | bool | None = None
    """The projector that a GGUF file sees through; None: what lies beside it, False: none."""

    def __post_init__(self) -> None:
        positive(self, "max_model_len")
        self._check_attention_window()
        flags(self, "skip_tokenizer_init", "strict", "enforce_eager", "verify", "nvtx")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(
                f"skip_tokenizer_init leaves no use for tokenizer={str(self.tokenizer)!r}. "
                "Give one of them."
            )
        if self.quantization is not None and not isinstance(self.quantization, str):
            raise ConfigError(f"quantization must be a name, not {self.quantization!r}.")
        one_of(self, "dtype", ("auto", "float32", "float", "bfloat16", "float16", "half"))
        one_of(self, "load_format", ("auto", "dummy"))
        object.__setattr__(self, "compilation", CompilationConfig.of(self.compilation))
        cut: object = self.mm_processor_kwargs
        if not isinstance(cut, Mapping | None):
            raise ConfigError(
                'mm_processor_kwargs must be an object such as {"max_pixels": 401408}, not '
                f"{type(cut).__name__}."
            )
        if self.mmproj is True or not isinstance(self.mmproj, str | Path | bool | None):
            raise ConfigError(
                f"mmproj must be a projector's file in GGUF, or False, not {self.mmproj!r:.80}."
            )
        if self.mmproj == "":
            raise ConfigError("mmproj is empty: name a projector's file in GGUF, or leave it out.")
        self._check_device()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed must be an integer of at least 0, not {self.seed!r}.")
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(f"model must be a folder, a hub id or a name, not {self.model!r}.")
        if not isinstance(self.tokenizer, str | Path | None):
            raise ConfigError(f"tokenizer must be a folder or a hub id, not {self.tokenizer!r}.")

    def _check_attention_window(self) -> None:
        positive(self, "max_attention_window")
        first = self.sink_token_length
        if first is None:
            return
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= SINKS:
            raise ConfigError(
                f"sink_token_length must be a number of tokens from 0 to {SINKS}, not {first!r}."
            )
        if self.max_attention_window is None:
            raise ConfigError(
                f"sink_token_length={first} has no effect without a max_attention_window, of which "
                "they are the first. Give both."
            )

    def _check_device(self) -> None:
        device = self.device
        # torch wraps numbers above 127 around: cuda:256 would be cuda:0
        if not isinstance(device, str) or not re.fullmatch(_DEVICES, device):
            raise ConfigError(
                f"device must be auto, cpu, cuda or cuda:N with N from 0 to 99, not {device!r}."
            )
        choices(self, "deterministic")
        if device == "cpu" and self.deterministic is False:
            raise ConfigError(
                "deterministic=False has no effect on a CPU, whose kernels have one order of "
                "additions. Leave it out."
            )
        if device == "cpu" and self.compilation is not None:
            raise ConfigError(
                "A compilation_config is of a GPU's steps; a CPU's are one native call. Leave it "
                "out, or choose device='cuda'."
            )
        if self.enforce_eager and self.compilation is not None:
            raise ConfigError(
                "enforce_eager leaves a compilation_config nothing to do. Give one of them."
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where keys and values live."""

    layout: Literal["paged", "linear"] = "paged"  # linear: a sequence's keys lie side by side
    block_size: int = 32  # tokens
    num_blocks: int | None = None  # None: what can be used, up to 4 GiB or one full sequence
    memory_fraction: float = (
        MEMORY_FRACTION  # never more than this of the memory free after the weights
    )
    enable_prefix_caching: bool | None = None  # None: on, but with kivi, which it can't go with
    # auto: what an export or engine was made with, else that of the activations
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_recent_window: int | None = None  # tokens that kivi keeps in bfloat16; None: 128
    prefix_cache_dir: str | Path | None = None  # where prefixes outlive the process; None: nowhere
    prefix_cache_disk_space: float = DISK_SPACE  # GiB of it, at most

    def __post_init__(self) -> None:
        positive(self, "block_size", "num_blocks")
        one_of(self, "layout", ("paged", "linear"))
        one_of(self, "kv_cache_dtype", get_args(KvCacheDtype))
        if self.block_size % 32:
            raise ConfigError(f"block_size must be a multiple of 32 tokens, not {self.block_size}.")
        self._check_window()
        self._check_disk()
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise ConfigError(f"memory_fraction must be a number, not {fraction!r}.")
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization (memory_fraction) must be in (0, 1], not {fraction!r}."
            )
        if self.num_blocks is not None and fraction != MEMORY_FRACTION:
            raise ConfigError(
                f"num_blocks={self.num_blocks} leaves memory_fraction={fraction} (also "
                "gpu_memory_utilization) nothing to decide. Give one of them."
            )

    def _check_disk(self) -> None:
        space, folder = self.prefix_cache_disk_space, self.prefix_cache_dir
        if isinstance(space, bool) or not isinstance(space, int | float) or not 0 < space < 1e9:
            raise ConfigError(
                f"prefix_cache_disk_space must be a number of GiB above 0, not {space!r}."
            )
        if folder is None and space != DISK_SPACE:
            raise ConfigError(
                f"prefix_cache_disk_space={space} has no effect without a prefix_cache_dir."
            )
        if not isinstance(folder, str | Path | None) or folder == "":
            raise ConfigError(f"prefix_cache_dir must be a folder, not {folder!r}.")
        if folder is not None and self.kv_cache_dtype == "kivi":
            raise ConfigError(
                "prefix_cache_dir keeps what the prefix cache finds, and kv_cache_dtype='kivi' "
                "goes without one. Leave one of them out."
            )
        if folder is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "prefix_cache_dir keeps what the prefix cache finds, and enable_prefix_caching is "
                "off. Leave one of them out."
            )

    def block_tokens(self, max_model_len: int) -> int:
        """Tokens of a block: in a linear cache all that a sequence may have."""
        return self.block_size if self.layout == "paged" else -(-max_model_len // 32) * 32

    def _check_linear(self) -> None:
        """Raises ConfigError for what is only of blocks that are shared, or smaller."""
        asked = {
            "enable_prefix_caching": bool(self.enable_prefix_caching),
            "kv_cache_dtype='kivi'": self.kv_cache_dtype == "kivi",
        }
        for name, given in asked.items():
            if given:
                raise ConfigError(
                    f"layout='linear' gives each sequence one block for all its tokens, so {name} "
                    "can't take effect. Leave one of them out."
                )
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", False)

    def _check_window(self) -> None:
        positive(self, "kv_recent_window")
        kivi = self.kv_cache_dtype == "kivi"
        if self.layout == "linear":
            self._check_linear()
        if self.kv_recent_window is not None and not kivi:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} has no use for "
                f"kv_recent_window={self.kv_recent_window}. Set kv_cache_dtype='kivi', or leave it "
                "out."
            )
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", not kivi)
        flags(self, "enable_prefix_caching")
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
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS  # tokens in one step
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None  # a GPU's next step is begun early; None: where it can be
    enable_jump_forward: bool = True  # tokens that a grammar forces take no step of their own
    policy: Literal["fcfs", "priority", "sjf", "edf"] = "fcfs"
    ttft_slo_s: float | None = None  # edf: for requests that don't bring their own
    tpot_slo_s: float | None = None
    starvation_s: float = STARVATION_S  # who has waited longer goes ahead of all who haven't
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"  # auto: what costs less
    swap_space: float | None = None  # GiB; None: 1, or a tenth of the free memory if that is less

    def __post_init__(self) -> None:
        positive(self, "max_num_seqs", "max_num_batched_tokens")
        flags(self, "enable_chunked_prefill", "enable_jump_forward")
        choices(self, "async_scheduling")
        one_of(self, "policy", ("fcfs", "priority", "sjf", "edf"))
        one_of(self, "preemption_mode", ("auto", "recompute", "swap"))
        seconds(self, "ttft_slo_s", "tpot_slo_s", "starvation_s")
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

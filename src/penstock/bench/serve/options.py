"""Everything that a run can be told, checked before anything else happens.

Light to import: the command line takes its defaults from here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces

_TRACES = ("azure", "mooncake")
_TEXTS = ("sharegpt", "custom")
_MADE = ("random", "shared-prefix", "multi-turn")
_OF_WORKLOADS: dict[str, tuple[str, ...]] = {
    "dataset_path": (*_TRACES, *_TEXTS),
    "answer_len": _TEXTS,
    "time_scale": _TRACES,
    "block_tokens": ("mooncake",),
    "input_len": ("random", "multi-turn"),
    "output_len": _MADE,
    "range_ratio": _MADE,
    "num_groups": ("shared-prefix",),
    "prefix_len": ("shared-prefix",),
    "suffix_len": ("shared-prefix",),
    "num_turns": ("multi-turn",),
    "think_time_s": ("multi-turn",),
}
"""What shapes only some workloads."""

_CALLED = {
    "input_len": "--random-input-len",
    "output_len": "--random-output-len",
    "range_ratio": "--random-range-ratio",
    "think_time_s": "--think-time",
    "answer_len": "--sharegpt-output-len and --custom-output-len",
}
"""Options that aren't called as their fields are."""

Backend = Literal["openai", "openai-chat"]
PromptForm = Literal["auto", "ids", "text"]
LongPrompts = Literal["drop", "cut"]
Dataset = Literal[
    "random", "shared-prefix", "multi-turn", "azure", "mooncake", "sharegpt", "custom"
]


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a run can be told; named as on the command line."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    backend: Backend = "openai"
    endpoint: str | None = None
    api_key: str | None = field(default=None, repr=False)
    tokenizer: str | None = None
    prompt_form: PromptForm = "auto"
    vocab_size: int | None = None
    dataset_name: Dataset = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = None  # None: 200, or of a trace all
    answer_len: int | None = None  # of texts; None: what the file says
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    num_groups: int = 8
    prefix_len: int = 512
    suffix_len: int = 64
    num_turns: int = 4
    think_time_s: float = 1.0
    block_tokens: int = MOONCAKE_BLOCK
    max_input_len: int | None = None
    max_output_len: int | None = None
    long_prompts: LongPrompts = "drop"
    request_rate: float | None = None  # None: a trace's own times, else inf
    burstiness: float = 1.0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    ready_timeout_s: float = 0.0
    max_retries: int = 0
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput: dict[str, float] = field(default_factory=dict)  # seconds by metric
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.dataset_name in (*_TRACES, *_TEXTS) and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path FILE.")
        self._check_effect([f.name for f in fields(self) if getattr(self, f.name) != f.default])
        if self.prompt_form == "ids" and self.backend == "openai-chat":
            raise ConfigError("--backend openai-chat takes messages of text, not token ids.")
        if self.prompt_form == "ids" and self.dataset_name == "multi-turn":
            raise ConfigError(
                "multi-turn sends answers back, which come as text: use --prompt-form text."
            )
        bad = [p for p in self.percentiles if not 0 <= p <= 100]
        if bad:
            raise ConfigError(f"--metric-percentiles {bad[0]:g} isn't between 0 and 100.")
        if not self.timeout_s > 0:
            raise ConfigError(f"--request-timeout is {self.timeout_s:g} s; it must be above 0.")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"--random-range-ratio is {self.range_ratio:g}; it must be in [0, 1)."
            )
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(
                f"--request-rate is {self.request_rate:g}; it must be above 0, or inf."
            )
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness is {self.burstiness:g}; it must be above 0.")
        if not 0 <= self.time_scale < math.inf:
            raise ConfigError(f"--time-scale is {self.time_scale:g}; it must be 0 or more.")

    @classmethod
    def of(cls, **given: Any) -> Options:
        """From what was given, None being what wasn't.

        Raises ConfigError for what can't take effect, even if it is the default.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        options = cls(**chosen)
        options._check_effect(chosen)
        return options

    def _check_effect(self, given: Collection[str]) -> None:
        """Raises ConfigError where an option that was given means nothing beside the others."""
        for name, datasets in _OF_WORKLOADS.items():
            if name in given and self.dataset_name not in datasets:
                raise ConfigError(
                    f"{_CALLED.get(name, '--' + name.replace('_', '-'))} means nothing to "
                    f"--dataset-name {self.dataset_name}: it is for {' or '.join(datasets)}."
                )
        if "time_scale" in given and self.request_rate is not None:
            raise ConfigError("--request-rate replaces the times that --time-scale stretches.")
        at_a_rate = self.request_rate is not None and not math.isinf(self.request_rate)
        if "burstiness" in given and not at_a_rate:
            raise ConfigError("--burstiness shapes the gaps of a finite --request-rate.")
        if "long_prompts" in given and self.max_input_len is None:
            raise ConfigError(
                "--long-prompts says what becomes of prompts above --max-input-len: give that too."
            )
        if self.long_prompts == "cut" and self.dataset_name == "multi-turn":
            raise ConfigError(
                "--long-prompts cut shortens single prompts; a conversation of multi-turn that is "
                "longer than --max-input-len is always left out whole."
            )
        if "vocab_size" in given and self.has_texts:
            raise ConfigError(
                f"--vocab-size draws ids; {self.dataset_name} has texts. Leave it out."
            )
        if "vocab_size" in given and self.needs_text:
            raise ConfigError(
                "--vocab-size draws token ids, but these prompts are text, of the tokenizer's "
                "words. Leave it out, or send ids: --backend openai --prompt-form ids."
            )

    @property
    def has_texts(self) -> bool:
        """Whether prompts are real texts, which the tokenizer reads."""
        return self.dataset_name in _TEXTS

    @property
    def needs_text(self) -> bool:
        """Whether prompts can't be token ids."""
        return (
            self.backend == "openai-chat"
            or self.dataset_name == "multi-turn"
            or self.prompt_form == "text"
        )

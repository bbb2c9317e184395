"""Everything that a run can be told, checked before anything else happens.

Light to import: the command line takes its defaults from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces

_OF_A_WORKLOAD = {
    "num_groups": "shared-prefix",
    "prefix_len": "shared-prefix",
    "suffix_len": "shared-prefix",
    "num_turns": "multi-turn",
    "think_time_s": "multi-turn",
}

Backend = Literal["openai", "openai-chat"]
PromptForm = Literal["auto", "ids", "text"]
LongPrompts = Literal["drop", "cut"]
Dataset = Literal["random", "shared-prefix", "multi-turn", "azure", "mooncake"]


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
        if self.dataset_name in ("azure", "mooncake"):
            if self.dataset_path is None:
                raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path FILE.")
        else:
            if self.dataset_path is not None:
                raise ConfigError(
                    f"--dataset-path means nothing to --dataset-name {self.dataset_name}: it is "
                    "for azure and mooncake."
                )
            if self.time_scale != 1.0:
                raise ConfigError("--time-scale stretches a trace's times: azure's or mooncake's.")
        self._check_workload()
        if self.dataset_name != "mooncake" and self.block_tokens != MOONCAKE_BLOCK:
            raise ConfigError("--block-tokens is of --dataset-name mooncake.")
        if self.time_scale != 1.0 and self.request_rate is not None:
            raise ConfigError("--request-rate replaces the times that --time-scale stretches.")
        if self.burstiness != 1.0 and (self.request_rate is None or math.isinf(self.request_rate)):
            raise ConfigError("--burstiness shapes the gaps of a finite --request-rate.")
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

    def _check_workload(self) -> None:
        """What shapes one workload means nothing to another."""
        for name, dataset in _OF_A_WORKLOAD.items():
            default = type(self).__dataclass_fields__[name].default
            if self.dataset_name != dataset and getattr(self, name) != default:
                option = "--" + name.removesuffix("_s").replace("_", "-")
                raise ConfigError(
                    f"{option} means nothing to --dataset-name {self.dataset_name}: it is for "
                    f"{dataset}."
                )

    @property
    def needs_text(self) -> bool:
        """Whether prompts can't be token ids."""
        return (
            self.backend == "openai-chat"
            or self.dataset_name == "multi-turn"
            or self.prompt_form == "text"
        )

"""LoRA adapters beside the model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import flags, positive
from penstock.errors import ConfigError

MAX_RANK = 512
"""The largest rank that slots can have room for, as in vLLM."""

MAX_SLOTS = 4096
"""The most adapters in memory."""

_MAX_LORAS = 8
_MAX_LORA_RANK = 16

_GUESSING = ("self", "medusa", "eagle", "eagle3")
"""Methods of guessing that read the model's own layers, or check several ways in one step."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Whether requests may name adapters, and how many are in memory."""

    enable_lora: bool = False
    max_loras: int = _MAX_LORAS  # adapters in memory; steps may mix all of them
    max_lora_rank: int = _MAX_LORA_RANK  # slots have room for it, and steps read all of that

    def __post_init__(self) -> None:
        flags(self, "enable_lora")
        positive(self, "max_loras", "max_lora_rank")
        if self.max_loras > MAX_SLOTS:
            raise ConfigError(f"max_loras is {self.max_loras}, and {MAX_SLOTS} is the most.")
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(
                f"max_lora_rank is {self.max_lora_rank}, and {MAX_RANK} is the most. Merge such an "
                "adapter (penstock export --merge-lora)."
            )
        for name, usual in (("max_loras", _MAX_LORAS), ("max_lora_rank", _MAX_LORA_RANK)):
            if not self.enable_lora and getattr(self, name) != usual:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect without enable_lora=True. Set "
                    "that, or leave it out."
                )

    def check_method(self, method: str | None) -> None:
        """Raises ConfigError for a way to guess that doesn't go with adapters."""
        if self.enable_lora and method in _GUESSING:
            raise ConfigError(
                f"enable_lora doesn't go with guesses by {method!r}, which are made by the model's "
                "own layers or checked on several ways at once. Use ngram, suffix or draft_model."
            )

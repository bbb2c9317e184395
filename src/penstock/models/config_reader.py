"""Reading `config.json`: every key is read, refused, or named."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from penstock.errors import UnsupportedModelError

_HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path
    initializer_range pad_token_id auto_map pretraining_tp id2label label2id return_dict
    output_attentions output_hidden_states is_encoder_decoder is_decoder attention_dropout
    hidden_dropout hidden_dropout_prob embd_pdrop attn_pdrop resid_pdrop summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    task_specific_params unk_token_id sep_token_id decoder_start_token_id
    cross_attention_hidden_size chunk_size_feed_forward problem_type classifier_dropout _attn_implementation
    attn_implementation gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss
    finetuning_task tokenizer_class prefix begin_suppress_tokens is_composition
    attention_probs_dropout_prob resid_dropout embedding_dropout residual_dropout
    cache_implementation add_cross_attention output_router_logits
    """.split()
)


class ConfigReader:
    """A `config.json` that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null; counts as reading it."""
        self._read.add(key)
        return self._config.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value of `key`; an error where it is absent."""
        if not self.has(key):
            raise UnsupportedModelError(
                f"config.json has no {key!r}, which {self._config.get('model_type')!r} needs."
            )
        return self._config[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModelError(f"config.json: {key} must be a positive integer: {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.require(key) if default is None else self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UnsupportedModelError(f"config.json: {key} must be a number: {value!r}")
        return float(value)

    def only(self, key: str, allowed: Collection[Any], default: Any) -> Any:
        """A value that must be one of those that are built."""
        value = self.get(key, default)
        if value not in allowed:
            raise UnsupportedModelError(
                f"config.json asks for {key}={value!r}; built for this family: "
                f"{', '.join(map(repr, allowed))}."
            )
        return value

    def nested(self, key: str) -> ConfigReader | None:
        """A sub-dictionary as a reader of its own."""
        value = self.get(key)
        return None if value is None else ConfigReader(value)

    def unread(self) -> list[str]:
        """Keys that nobody asked for and that could change the result."""
        return sorted(k for k in self._config if k not in self._read and k not in _HARMLESS)

    def finish(self, *, strict: bool) -> None:
        """Name the keys nobody read: one warning, or an error when strict."""
        rest = self.unread()
        if not rest:
            return
        message = (
            f"config.json ({self._config.get('model_type')!r}) has keys that nothing reads: "
            f"{', '.join(rest)}. If one of them changes the model, its output is wrong."
        )
        if strict:
            raise UnsupportedModelError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

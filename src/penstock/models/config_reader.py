"""Reading `config.json`: every key is read, refused, or named."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from penstock.errors import UnsupportedModelError

_HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path
    name_or_path _commit_hash auto_map tokenizer_class pad_token_id sep_token_id unk_token_id
    decoder_start_token_id bos_token_id eos_token_id prefix problem_type id2label label2id
    num_labels finetuning_task task_specific_params is_decoder is_composition tie_encoder_decoder
    cross_attention_hidden_size tie_last_hidden_states quantization_config

    initializer_range gradient_checkpointing attention_dropout hidden_dropout hidden_dropout_prob
    embd_pdrop attn_pdrop resid_pdrop resid_dropout embedding_dropout residual_dropout
    attention_probs_dropout_prob classifier_dropout summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout

    return_dict output_attentions output_hidden_states output_router_logits torchscript use_bfloat16
    chunk_size_feed_forward tf_legacy_loss pretraining_tp _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled is_llama_config transformers.js_config
    unsloth_fixed unsloth_version

    cache_implementation max_length min_length max_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
    """.split()
)
"""Keys about identity, training, execution and sampling: none changes a forward pass.

`quantization_config` is read where the weights are (`models.sources`).
"""

_QUANTIZED = "only quantization_config is read; give the checkpoint as its tool writes it today"
_EXPERTS = "mixtures of experts aren't built for this family"
_SHARED = "experts that all tokens share aren't built"
_MULTIPLIER = "this multiplier isn't built"

_UNBUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "compression_config": ((None, {}), _QUANTIZED),
    "quantization": ((None, {}), _QUANTIZED),
    "num_experts": ((None, 0), _EXPERTS),
    "num_local_experts": ((None, 0), _EXPERTS),
    "n_routed_experts": ((None, 0), _EXPERTS),
    "moe_num_experts": ((None, 0), _EXPERTS),
    "n_shared_experts": ((None, 0), _SHARED),
    "shared_expert_intermediate_size": ((None, 0), _SHARED),
    "attention_multiplier": ((None,), _MULTIPLIER),
    "embedding_multiplier": ((None, 1), _MULTIPLIER),
    "residual_multiplier": ((None, 1), _MULTIPLIER),
    "logits_scaling": ((None, 1), _MULTIPLIER),
    "logit_scale": ((None, 1), _MULTIPLIER),
    "scale_emb": ((None, 1), _MULTIPLIER),
    "scale_depth": ((None,), _MULTIPLIER),
    "dim_model_base": ((None,), _MULTIPLIER),
    "alibi": ((None, False), "ALiBi isn't built"),
    "use_alibi": ((None, False), "ALiBi isn't built"),
    "clip_qkv": ((None,), "clipped queries, keys and values aren't built"),
    "rope_interleaved": ((None, False), "interleaved rotary embedding isn't built for it"),
    "use_mrope": ((None, False), "multimodal rotary embedding isn't built"),
    "use_bidirectional_attention": ((None, False), "attention to later tokens isn't built"),
    "is_encoder_decoder": ((None, False), "encoder-decoder models aren't built"),
    "add_cross_attention": ((None, False), "cross-attention isn't built"),
    "pruned_heads": ((None, {}), "pruned heads aren't built"),
    "per_layer_config": ((None, {}), "layers with configs of their own aren't built"),
}
"""Keys that any config may carry: the values that ask for nothing, and why others are refused."""


_MOST = {"num_hidden_layers": 10_000, "n_layer": 10_000}
_MOST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10_000)
"""Something is made for each of them, before the tensors are looked at."""
_SIZE = re.compile(r"size|dim|head|rank|expert|kernel|conv_L|multiple")
"""In the names of what the shapes of tensors follow from."""


class ConfigReader:
    """A `config.json`, or an object in it, that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._read: set[str] = set()
        self._parts: list[ConfigReader] = []
        self._defaults: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        """Sizes that were read and that the config doesn't say."""

    def assume(self, **defaults: Any) -> None:
        """The family's defaults of keys that are absent; those that are null stay so."""
        self._defaults |= {k: v for k, v in defaults.items() if k not in self._config}
        self._config = {**defaults, **self._config}

    def replace(self, **values: Any) -> None:
        """Values in place of what the config has."""
        self._config = {**self._config, **values}

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
                f"{self._where} has no {key!r}, which this kind of model needs."
            )
        return self._config[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModelError(
                f"{self._where}: {key} must be a positive integer: {value!r}"
            )
        if value > _MOST.get(key, value):
            raise UnsupportedModelError(
                f"{self._where}: {key} is beyond {_MOST[key]:,}, which no model has"
            )
        if _SIZE.search(key) and (key in self._defaults or self._config.get(key) is None):
            self.sizes[key] = value
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.require(key) if default is None else self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UnsupportedModelError(f"{self._where}: {key} must be a number: {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise UnsupportedModelError(f"{self._where}: {key} must be above 0: {value!r}")
        return value

    def only(self, key: str, allowed: Collection[Any], default: Any) -> Any:
        """A value that must be one of those that are built."""
        value = self.get(key, default)
        if value not in allowed:
            raise UnsupportedModelError(
                f"{self._where} asks for {key}={value!r}; built for this family: "
                f"{', '.join(map(repr, allowed))}."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        return bool(self.only(key, (False, True), default))

    def nullable(self, key: str, default: Any) -> Any:
        """The value of `key`: None where it is null, `default` only where it is absent."""
        self._read.add(key)
        return self._config.get(key, default)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self.require(key)
        if not isinstance(values, list):
            raise UnsupportedModelError(f"{self._where}: {key} must be a list: {values!r}")
        each = ConfigReader({str(i): value for i, value in enumerate(values)}, key)
        return tuple(each.number(str(i)) for i in range(len(values)))

    def nested(self, key: str) -> ConfigReader | None:
        """A sub-dictionary as a reader of its own; None where it is absent, null or empty."""
        value = self.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(f"{self._where}: {key} must be an object: {value!r}")
        return ConfigReader(value, key)

    def part(self, key: str) -> ConfigReader:
        """A sub-dictionary that describes a model of its own, {} where it is absent.

        What nobody reads of it is refused and named with what nobody reads of this config.
        """
        found = self.nested(key) or ConfigReader({}, key)
        self._parts.append(found)
        return found

    @property
    def dtype(self) -> str | None:
        """Of the checkpoint's tensors, under either of its names; None where it isn't said."""
        found = self.get("dtype", self.get("torch_dtype"))
        return None if found is None else str(found).removeprefix("torch.")

    def refuse_unbuilt(self) -> None:
        """Raise for what the config asks for and its family hasn't read, whichever family it is."""
        for part in self._parts:
            part.refuse_unbuilt()
        for key, (off, reason) in _UNBUILT.items():
            value = self._config.get(key)
            if value not in off and key not in self._read:
                shown = repr(value) if len(repr(value)) < 60 else "…"
                raise UnsupportedModelError(f"config.json asks for {key}={shown}: {reason}.")

    def unread(self) -> list[str]:
        """Keys that nobody asked for and that could change the result."""
        known = self._read | _HARMLESS | _UNBUILT.keys()
        return sorted(key for key in self._config if key not in known)

    def finish(self, *, strict: bool) -> None:
        """Name the keys nobody read: one warning, or an error when strict."""
        for part in self._parts:
            part.finish(strict=strict)
        rest = self.unread()
        if not rest:
            return
        message = (
            f"{self._where} ({self._config.get('model_type')!r}) has keys that nothing reads: "
            f"{', '.join(rest)}. If one of them changes the model, its output is wrong."
        )
        if strict:
            raise UnsupportedModelError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

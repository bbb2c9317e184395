"""One way to run a model, in words: `MODEL[:option,option…]`.

Options: a `--quantization` name; `dtype=float32` (or the dtype alone), also `float16`, which
references compute in, and `tf32` (`bench.tf32`); `kv=int8`; `eager`, the operators called one by
one; `graph` and `compiled`, by the model's exported graph, or by that as a package; `isa=avx2` and
`kernels=reference`, what the operators are run by; `device=cpu`, where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.config import DEFAULT_MODEL, EngineConfig, SchedulerConfig
from penstock.errors import ConfigError, nearest
from penstock.kernels import native
from penstock.kernels.load import ISAS
from penstock.models.activations import ACTIVATIONS
from penstock.quant import formats_of

DTYPES = ("float32", "bfloat16", "float16", "tf32")
TF32 = "tf32"
KERNELS = ("native", "reference")
_SYNONYMS = {"float": "float32", "half": "float16"}
FORMS = ("graph", "compiled")
_KEYS = ("dtype", "kv", "isa", "kernels", "device")


@dataclass(frozen=True, slots=True)
class Variant:
    """A model and the form in which it runs; what isn't chosen is as everywhere else."""

    model: str | Path = DEFAULT_MODEL  # whatever `load_runtime` takes
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    eager: bool = False
    form: str | None = None  # graph or compiled: by the model's graph (`bench.graph_form`)
    isa: str | None = None  # None: as in this process
    kernels: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.quantization is not None:
            _check_quantization(self.quantization)
        object.__setattr__(self, "dtype", _SYNONYMS.get(self.dtype, self.dtype))
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(
                f"dtype={self.dtype!r} isn't one of auto, {', '.join(DTYPES)} (or float, "
                f"half).{nearest(self.dtype, DTYPES)}"
            )
        if self.dtype == TF32 and (self.quantization or self.form):
            raise ConfigError(
                f"dtype={TF32} rounds what a float32 model multiplies, operator by operator, so "
                f"{self.quantization or self.form} can't take effect. Leave one of them out."
            )
        if self.dtype == "float16" and self.kernels is None and self.device != "cuda":
            object.__setattr__(self, "kernels", "reference")  # no others compute in it
        if self.eager and self.form is not None:
            raise ConfigError(f"eager and {self.form} are two ways to run. Leave one of them out.")
        if self.isa is not None and self.isa not in ISAS:
            raise ConfigError(
                f"isa={self.isa!r} isn't one of {', '.join(ISAS)}.{nearest(self.isa, ISAS)}"
            )
        if self.kernels is not None and self.kernels not in KERNELS:
            raise ConfigError(f"kernels={self.kernels!r} isn't one of {', '.join(KERNELS)}.")
        if self.isa is not None and self.kernels == "reference":
            raise ConfigError(
                f"isa={self.isa} chooses among native kernels, and kernels=reference runs none. "
                "Leave one of them out."
            )

    def __str__(self) -> str:
        """The words that `parse` takes for this."""
        chosen = [
            self.quantization or "",
            "" if self.dtype == "auto" else f"dtype={self.dtype}",
            "" if self.kv_cache_dtype == "auto" else f"kv={self.kv_cache_dtype}",
            "eager" if self.eager else "",
            self.form or "",
            f"isa={self.isa}" if self.isa else "",
            f"kernels={self.kernels}" if self.kernels else "",
            "" if self.device == "auto" else f"device={self.device}",
        ]
        words = ",".join(filter(None, chosen))
        return f"{self.model}:{words}" if words else str(self.model)

    @classmethod
    def parse(cls, words: str, model: str | Path | None = None) -> Variant:
        """`words` as a variant; `model` is meant where they name none (`:w4a8`).

        Raises ConfigError for an option that isn't known or comes twice.
        """
        if words and Path(words).exists():  # a path may have a colon
            return cls(words)
        name, colon, options = words.rpartition(":")
        if not colon:
            name, options = words, ""
        if not name and model is None:
            raise ConfigError(
                f"{words!r} names no model. The first variant needs one: MODEL{words or ':w4a8'}."
            )
        if not name and not colon:
            raise ConfigError("A variant can't be empty. Write : to mean the first one's model.")
        if not colon and _is_options(words):
            raise ConfigError(f"{words!r} is a form, not a model. Write MODEL:{words} or :{words}.")
        return cls(name or model or "", **parse_options(options))

    def with_options(self, words: str) -> Variant:
        """This with the options in `words` in place of its own; another quantization or none."""
        return replace(self, **{"quantization": None, **parse_options(words)})

    def config(self, window: int | None) -> EngineConfig:
        """The engine's for one sequence of up to `window` tokens, or of all that the model has."""
        return EngineConfig.of(
            model=self.model,
            dtype="float32" if self.dtype == TF32 else self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            enforce_eager=self.eager or self.dtype == TF32,
            device=self.device,
            max_model_len=window,
            max_num_seqs=1,
        ).suggesting(
            max_num_batched_tokens=max(window or 0, SchedulerConfig().max_num_batched_tokens)
        )

    @property
    def here(self) -> bool:
        """Whether this process runs the kernels that it asks for."""
        if self.isa is not None:
            return self.isa == native.isa
        return self.kernels is None or (self.kernels == "native") == (native.handle is not None)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base`, an environment, in which a process runs the kernels that it asks for."""
        found = dict(base)
        if self.kernels == "reference":
            found.pop("PENSTOCK_ISA", None)
            found["PENSTOCK_KERNELS"] = "reference"
        elif self.isa is not None or self.kernels is not None:
            found["PENSTOCK_KERNELS"] = "native"
            if self.isa is not None:
                found["PENSTOCK_ISA"] = self.isa
        return found


def parse_options(words: str) -> dict[str, Any]:
    """Fields of a `Variant` from `w4a8,kv=int8,eager`; empty words give none."""
    found: dict[str, Any] = {}
    for word in filter(None, (w.strip() for w in words.split(","))):
        name, value = _option(word)
        if name in found:
            raise ConfigError(f"{words!r} says {name} twice. Leave one of them out.")
        found[name] = value
    return found


def _check_quantization(name: str) -> None:
    """Raises ConfigError for a name that no weights are loaded by."""
    if name not in ACTIVATIONS:
        formats_of(name, torch.bfloat16)  # others are known there


def _is_options(words: str) -> bool:
    try:
        return bool(parse_options(words))
    except ConfigError:
        return False


def _option(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if equals:
        names = {"kv": "kv_cache_dtype", **{k: k for k in _KEYS if k != "kv"}}
        if key not in names:
            raise ConfigError(
                f"{word!r} isn't an option of a variant; those with a value are "
                f"{', '.join(f'{k}=' for k in _KEYS)}.{nearest(key, _KEYS)}"
            )
        if not value:
            raise ConfigError(f"{word!r} has no value.")
        return names[key], value
    if word == "eager":
        return "eager", True
    if word in FORMS:
        return "form", word
    if word in (*DTYPES, *_SYNONYMS):
        return "dtype", word
    try:
        _check_quantization(word)
    except ConfigError as error:
        raise ConfigError(
            f"{word!r} isn't an option of a variant. Beside eager, {', '.join(FORMS + DTYPES)}, "
            f"dtype=, kv=, isa=, kernels= and device=, it may be a quantization: {error}"
        ) from error
    return "quantization", word

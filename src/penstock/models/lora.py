"""A checkpoint with a LoRA adapter added to its matrices, as a source.

W' = W + scale · B · A in float32, rounded once to W's dtype; scale is alpha / r, or alpha / √r with
`use_rslora`. Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; files
as PEFT writes them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.over import Over
from penstock.models.registry import ADAPTER, read_json
from penstock.models.weights import Source
from penstock.quant import Codes

WEIGHTS = "adapter_model.safetensors"

_PART = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "target_parameters": (None, []),
}
"""Choices of an adapter that a plain product of two matrices stands for."""

_LEFT_ALONE = ("gaussian", "eva", "orthogonal")
"""Ways to begin, beside PEFT's own, that leave the model's matrices as they are.

With others (pissa, olora, corda, loftq) an adapter belongs to matrices that its training changed.
"""


class Merged(Over):
    """`base` with the adapter in `folder` added."""

    def __init__(self, base: Source, folder: Path) -> None:
        """Raises ModelNotFoundError where there is no adapter, UnsupportedModelError for one of
        another kind, WeightsError for one that doesn't fit `base`.
        """
        super().__init__(base)
        self.folder = folder
        self._config = _read_config(folder)
        self._file = _open(folder / WEIGHTS)
        self._parts: dict[str, dict[str, str]] = {}
        for key in self._file.keys():  # noqa: SIM118 (not a dict)
            match = _PART.fullmatch(key)
            if match is None:
                raise UnsupportedModelError(
                    f"{folder / WEIGHTS} holds {key}, which isn't a LoRA matrix of a linear layer."
                )
            self._parts.setdefault(f"{match[1]}.weight", {})[match[2]] = key
        self._check()

    def _check(self) -> None:
        if not self._parts:
            raise WeightsError(f"{self.folder / WEIGHTS} holds no matrices.")
        names = set(self._base.names())
        strange = [name for name in self._parts if name not in names]
        if strange:
            raise WeightsError(
                f"The adapter in {self.folder} changes {len(strange)} matrices that the model "
                f"lacks: {', '.join(strange[:3])}. It belongs to another model."
            )
        for name, keys in self._parts.items():
            if set(keys) != {"A", "B"}:
                raise WeightsError(f"The adapter in {self.folder} has only half of {name}.")
            a, b = (tuple(self._file.get_slice(keys[x]).get_shape()) for x in "AB")
            shape = self._base.shape(name)
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != shape or not a[0]:
                raise WeightsError(
                    f"{name} has {list(shape)}, but the adapter's B {list(b)} · A {list(a)} don't "
                    "give that. It belongs to another model."
                )
            if self._base.scheme(name) is not None:
                raise UnsupportedModelError(
                    f"{name} is quantized, so no adapter can be added to it. Merge it into the "
                    "unquantized model, and quantize that."
                )
            module = name.removesuffix(".weight")
            self._scale(module, a[0])  # that it has one
            self._check_rank(module, a[0])

    def files(self) -> list[Path]:
        """Of the base, and of the adapter."""
        return [*super().files(), self.folder / ADAPTER, self.folder / WEIGHTS]

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, with the adapter's product added where it has one."""
        found, keys = super().read(name), self._parts.get(name)
        if keys is None:
            return found
        assert isinstance(found, Tensor)
        a, b = (self._file.get_tensor(keys[x]).float() for x in "AB")
        module = name.removesuffix(".weight")
        merged: Tensor = found.float() + self._scale(module, a.shape[0]) * (b @ a)
        if not bool(merged.isfinite().all()):
            raise WeightsError(f"{name} with the adapter in {self.folder} is NaN or infinite.")
        return merged.to(found.dtype)

    def _check_rank(self, module: str, rank: int) -> None:
        """Raises WeightsError where the adapter's two files disagree: its scale depends on it."""
        asked = self._pattern("rank_pattern", module, self._config.get("r", rank))
        if asked != rank:
            raise WeightsError(
                f"{self.folder / ADAPTER} says rank {asked} for {module}, but its tensors have "
                f"{rank}. One of the two belongs to another adapter."
            )

    def _scale(self, module: str, rank: int) -> float:
        found = self._pattern("alpha_pattern", module, self._config["lora_alpha"])
        alpha = _alpha(self.folder / ADAPTER, "a value of alpha_pattern", found)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pattern(self, name: str, module: str, default: Any) -> Any:
        """What `name` says of a module, or `default`."""
        file, patterns = self.folder / ADAPTER, self._config.get(name) or {}
        if not isinstance(patterns, dict):
            raise UnsupportedModelError(f"{file}: {name} must be an object: {patterns!r}.")
        try:
            return _of(patterns, module, default)
        except re.error as error:
            raise UnsupportedModelError(
                f"{file}: {name} has a pattern that isn't one ({error}): {', '.join(patterns)}."
            ) from error

    @property
    def modules(self) -> list[str]:
        """Names of the matrices that change."""
        return sorted(self._parts)


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The first pattern that ends `module` decides, as in PEFT."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / ADAPTER).exists() or not (folder / WEIGHTS).exists():
        raise ModelNotFoundError(
            f"{folder} is no adapter: it needs {ADAPTER} and {WEIGHTS}, as PEFT writes them."
        )
    config = read_json(folder / ADAPTER)
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise UnsupportedModelError(
                f"{folder / ADAPTER} asks for {key}={config.get(key)!r}, which can't be merged."
            )
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | None) and str(start).lower() not in _LEFT_ALONE:
        raise UnsupportedModelError(
            f"{folder / ADAPTER} says init_lora_weights={start!r}: such training changes the model "
            "itself, so that its adapter doesn't fit the original one. Save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT."
        )
    _alpha(folder / ADAPTER, "lora_alpha", config.get("lora_alpha"))
    return config


def _alpha(file: Path, name: str, value: Any) -> float:
    """A number that fits a float, or an error."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if number and math.isfinite(value):
            return float(value)
    except OverflowError as error:
        raise UnsupportedModelError(f"{file}: {name} is too large: {error}.") from error
    raise UnsupportedModelError(f"{file}: {name} must be a number: {value!r}.")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} can't be read: {error}. Copy the adapter again.") from error

"""LoRA adapters as files, and a checkpoint with one added to its matrices, as a source.

W' = W + scale · B · A in float32, rounded once to W's dtype; scale is alpha / r, or alpha / √r with
`use_rslora`. Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; files
as PEFT writes them.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.checkpoint import Source
from penstock.models.over import Over
from penstock.models.registry import ADAPTER, read_json, read_spec
from penstock.models.weights import rules_name
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
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
}
"""Choices of an adapter that a plain product of two matrices stands for."""

_READ = frozenset(
    "r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights".split()
) | frozenset(_PLAIN)

_OF_TRAINING = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "exclude_modules inference_mode layers_pattern layers_to_transform loftq_config "
    "lora_dropout lora_ga_config megatron_config megatron_core peft_version qalora_group_size "
    "revision runtime_config target_modules task_type velora_config".split()
)
"""What PEFT keeps of how an adapter was trained and where: its tensors say what is in it."""

_EXPERTS = re.compile(
    r"\.experts(\.base_layer|\.gate_up_proj|\.down_proj)?\.weight"
    r"|\.block_sparse_moe\.(input|output)_linear\.weight"
)
"""Experts that lie in one tensor, as PEFT's target_parameters and Granite's files name them."""

_FLOATS = ("F32", "F16", "BF16", "F64")
"""What matrices are stored in, by safetensors' names."""

_LEFT_ALONE = ("gaussian", "eva", "orthogonal")
"""Ways to begin, beside PEFT's own, that leave the model's matrices as they are.

With others (pissa, olora, corda, loftq) an adapter belongs to matrices that its training changed.
"""


class LoraFiles:
    """An adapter's two files: what each of its matrices adds, and how much of it."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelNotFoundError where there is no adapter, UnsupportedModelError for one of
        another kind, WeightsError for one that can't be read or contradicts itself.
        """
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
        if not self._parts:
            raise WeightsError(f"{folder / WEIGHTS} holds no matrices.")

    @property
    def names(self) -> list[str]:
        """Of the model's matrices that change, sorted."""
        return sorted(self._parts)

    @property
    def rank(self) -> int:
        """The largest of its matrices'."""
        shapes = [self._shape(keys["A"]) for keys in self._parts.values() if "A" in keys]
        return max((shape[0] for shape in shapes if shape), default=0)

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def shapes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A [R, K] and B [N, R]."""
        return self._shape(self._parts[name]["A"]), self._shape(self._parts[name]["B"])

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises WeightsError where A and B don't change a matrix of that shape."""
        if len(shape) == 3:
            raise UnsupportedModelError(
                f"The adapter in {self.folder} changes a convolution ({name}), which isn't built: "
                "train one without."
            )
        if len(self._parts[name]) < 2:
            raise WeightsError(f"The adapter in {self.folder} has only half of {name}.")
        for key in self._parts[name].values():
            stored = str(self._file.get_slice(key).get_dtype())
            if stored not in _FLOATS:
                raise UnsupportedModelError(
                    f"{key} in {self.folder} holds {stored}, not one of {', '.join(_FLOATS)}."
                )
        a, b = self.shapes(name)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != shape or not a[0]:
            raise WeightsError(
                f"{name} has {list(shape)}, but the adapter's B {list(b)} · A {list(a)} don't "
                "give that. It belongs to another model."
            )
        self.scale(name)  # that it has one
        module = name.removesuffix(".weight")
        asked = self._pattern("rank_pattern", module, self._config.get("r", a[0]))
        if isinstance(asked, bool) or not isinstance(asked, int):
            raise WeightsError(
                f"{self.folder / ADAPTER} says rank {asked!r} for {module}, which isn't an integer."
            )
        if asked != a[0]:
            raise WeightsError(
                f"{self.folder / ADAPTER} says rank {asked} for {module}, but its tensors have "
                f"{a[0]}. One of the two belongs to another adapter."
            )

    def read(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B in float32."""
        a, b = (self._file.get_tensor(self._parts[name][x]).float() for x in "AB")
        return a, b

    def scale(self, name: str) -> float:
        """What B · A is multiplied by."""
        rank = self.shapes(name)[0][0]
        module = name.removesuffix(".weight")
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

    def strange(self, names: list[str]) -> WeightsError:
        """The error for matrices that the model lacks."""
        names = list(dict.fromkeys(names))
        why = "It belongs to another model."
        if all(_EXPERTS.search(name) for name in names):
            why = (
                "It belongs to another model, or changes experts that lie in one tensor, which "
                "isn't built: train it on other matrices."
            )
        return WeightsError(
            f"The adapter in {self.folder} changes {len(names)} matrices that the model "
            f"lacks: {', '.join(names[:3])}. {why}"
        )


class Merged(Over):
    """`base` with the adapter in `folder` added."""

    def __init__(self, base: Source, folder: Path) -> None:
        """Raises ModelNotFoundError where there is no adapter, UnsupportedModelError for one of
        another kind, WeightsError for one that doesn't fit `base`.
        """
        super().__init__(base)
        self.folder = folder
        self._lora = LoraFiles(folder)
        self._changed = self._find()  # a name here → the adapter's
        self._check()

    def _find(self) -> dict[str, str]:
        """What the adapter changes; some spell names as transformers does, not as the file."""
        names, wanted = self._base.names(), self._lora.names
        if set(wanted) <= set(names):
            return {name: name for name in wanted}
        spec = read_spec(self._base.path)
        there = {rules_name(name, spec): name for name in names}
        strange = [name for name in wanted if rules_name(name, spec) not in there]
        if strange:
            raise self._lora.strange(strange)
        return {there[rules_name(name, spec)]: name for name in wanted}

    def _check(self) -> None:
        for name, theirs in self._changed.items():
            self._lora.check(theirs, self._base.shape(name))
            if self._base.scheme(name) is not None:
                raise UnsupportedModelError(
                    f"{name} is quantized, so no adapter can be added to it. Merge it into the "
                    "unquantized model, and quantize that."
                )

    def files(self) -> list[Path]:
        """Of the base, and of the adapter."""
        return [*super().files(), self.folder / ADAPTER, self.folder / WEIGHTS]

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, with the adapter's product added where it has one."""
        found = super().read(name)
        if name not in self._changed:
            return found
        assert isinstance(found, Tensor)
        theirs = self._changed[name]
        a, b = self._lora.read(theirs)
        merged: Tensor = found.float() + self._lora.scale(theirs) * (b @ a)
        if not bool(merged.isfinite().all()):
            raise WeightsError(f"{name} with the adapter in {self.folder} is NaN or infinite.")
        return merged.to(found.dtype)

    @property
    def modules(self) -> list[str]:
        """Names of the matrices that change."""
        return sorted(self._changed)


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The first pattern that ends `module` decides, as in PEFT."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        complete = all((folder / name).is_file() for name in (ADAPTER, WEIGHTS))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{str(folder)[:200]} can't be looked at: {error}.") from error
    if not complete:
        raise ModelNotFoundError(
            f"{folder} is no adapter: it needs {ADAPTER} and {WEIGHTS}, as PEFT writes them."
        )
    config = read_json(folder / ADAPTER)
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise UnsupportedModelError(
                f"{folder / ADAPTER} asks for {key}={config.get(key)!r}, which isn't a plain LoRA. "
                "Merge it into its model with PEFT's merge_and_unload, and run that."
            )
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | None) and str(start).lower() not in _LEFT_ALONE:
        raise UnsupportedModelError(
            f"{folder / ADAPTER} says init_lora_weights={start!r}: such training changes the model "
            "itself, so that its adapter doesn't fit the original one. Save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT."
        )
    _alpha(folder / ADAPTER, "lora_alpha", config.get("lora_alpha"))
    _warn_of_unread(folder / ADAPTER, config)
    return config


def _warn_of_unread(file: Path, config: dict[str, Any]) -> None:
    asks = (key for key, value in config.items() if value not in (None, False, "", [], {}))
    rest = sorted(key for key in asks if key not in _READ | _OF_TRAINING)
    if rest:
        warnings.warn(
            f"{file} has keys that nothing reads: {', '.join(rest)}. If one of them changes the "
            "adapter, the output is wrong.",
            UserWarning,
            stacklevel=3,
        )


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

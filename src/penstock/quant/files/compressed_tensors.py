"""Checkpoints of compressed-tensors, which vLLM and LLM Compressor write and read.

A module's `weight_packed` (or `weight`, a byte a code) has `weight_scale` beside it and perhaps
`weight_zero_point`, `weight_global_scale`, `input_scale`. `config_groups` say of which kind, for
the modules that `targets` name. Source: the package of that name, 0.20, and its QuantizationArgs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes, groups
from penstock.quant.files.floats import float8_scheme, read_exponents, read_float8
from penstock.quant.files.layout import (
    Config,
    Found,
    Integers,
    Matrix,
    Tensors,
    check_dtype,
    check_shape,
    finite,
    integer_scheme,
    is_pair,
    matrix_shape,
    modules_with,
    need,
    number,
    option,
    scale_shape,
    spread,
    unpack_bits,
    unpack_nibbles,
)
from penstock.quant.scheme import BLOCK, Activations, Scheme

_BYTES = ("int-quantized", "float-quantized", "naive-quantized")
_FLOATS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FORMATS = ("pack-quantized", *_BYTES, *_FLOATS)
"""The formats that are read and written."""

_PARTS = (
    "weight weight_packed weight_scale weight_zero_point weight_shape weight_g_idx "
    "weight_global_scale input_scale input_zero_point input_global_scale"
).split()


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    _refuse(config)
    schemes = config.get("config_groups")
    if not isinstance(schemes, Mapping) or not schemes:
        raise UnsupportedModelError(
            "quantization_config of compressed-tensors has no config_groups."
        )
    found, names = Found(), set(tensors.names())
    for name in names:
        if name.endswith((".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")):
            found.hidden.add(name)
            found.note("the cache's own scales aren't used (choose it by kv_cache_dtype)", name)
    packed = modules_with(tensors, ".weight_packed")
    for module in sorted({*packed, *modules_with(tensors, ".weight_scale")}):
        group = _group_of(module, schemes, config.get("ignore") or ())
        kind = group.get("format") or config.get("format")
        if kind not in FORMATS:
            raise UnsupportedModelError(
                f"{module} is in compressed-tensors' format {kind!r}; "
                f"read are {', '.join(FORMATS)}."
            )
        matrix = _Module(tensors, names, module, group, found).matrix(kind)
        found.matrices[f"{module}.weight"] = matrix
    return found


def _refuse(config: Config) -> None:
    option(config, "quantization_status", ("compressed", None), "compressed")
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise UnsupportedModelError(f"quantization_config asks for {key}, which isn't built.")


def _group_of(module: str, schemes: Mapping[str, Any], ignore: Sequence[str]) -> Mapping[str, Any]:
    """The group whose targets name `module`: exactly, by a pattern, or as any linear layer."""
    ignored = next((pattern for pattern in ignore if _matches(module, pattern)), None)
    if ignored is not None:
        raise WeightsError(
            f"quantization_config ignores {ignored!r}, but {module} is quantized in the weights. "
            "They don't belong together."
        )
    given = [group for group in schemes.values() if isinstance(group, Mapping)]
    named = [(target, group) for group in given for target in group.get("targets", ())]
    kind = "Embedding" if "embed" in module else "Linear"
    exact = [group for target, group in named if target == module]
    pattern = [group for target, group in named if _matches(module, target)]
    for chosen in (exact, pattern, [group for target, group in named if target == kind]):
        if chosen:
            group = chosen[0]
            if not isinstance(group.get("weights"), Mapping):
                raise UnsupportedModelError(f"The group of {module} doesn't say what weights are.")
            return group
    raise WeightsError(
        f"{module} is quantized in the weights, but no group of quantization_config targets it: "
        f"{', '.join(target for target, _ in named)}."
    )


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


class _Module:
    """One module of a checkpoint while it is looked at."""

    def __init__(
        self,
        tensors: Tensors,
        names: set[str],
        module: str,
        group: Mapping[str, Any],
        found: Found,
    ) -> None:
        self.tensors, self.names, self.module, self.found = tensors, names, module, found
        self.weights: Mapping[str, Any] = group["weights"]
        self.bits = option(self.weights, "num_bits", (2, 4, 8), 8)
        self.float = option(self.weights, "type", ("int", "float"), "int") == "float"
        self.symmetric = option(self.weights, "symmetric", (True, False), True)
        self.group, self.rows = self._sharing()
        self.activations = self._activations(group)

    def _sharing(self) -> tuple[int, int]:
        """Columns (0: all) and rows (0: all) that share a scale."""
        size = self.weights.get("group_size")
        guess = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = self.weights.get("strategy") or guess
        match strategy:
            case "tensor":
                return 0, 0
            case "channel":
                return 0, 1
            case "group" | "tensor_group" if isinstance(size, int) and size > 0:
                return size, 1
            case "block":
                block = self.weights.get("block_structure")
                if is_pair(block):
                    return block[1], block[0]
        raise UnsupportedModelError(
            f"{self.module}: strategy {strategy!r} with group_size {size!r} isn't read; "
            "tensor, channel, group and block are."
        )

    def _activations(self, group: Mapping[str, Any]) -> Activations:
        if group.get("output_activations"):
            raise UnsupportedModelError(f"{self.module}: quantized outputs aren't built.")
        inputs = group.get("input_activations")
        if not inputs:
            return "float"
        kind, bits = inputs.get("type", "int"), inputs.get("num_bits", 8)
        even, strategy = inputs.get("symmetric", True), inputs.get("strategy") or "tensor"
        dynamic, size = inputs.get("dynamic", False), inputs.get("group_size")
        fits = self.float and self.bits == 8 if kind == "float" else not self.float
        if fits and bits == 8 and even:
            if dynamic is True and self._spreads(strategy, size, kind):
                return "int8" if kind == "int" else "fp8"
            if dynamic is False and strategy == "tensor":
                return "int8_static" if kind == "int" else "fp8_static"
        said = f"{kind}{bits}{'' if even else ' with a zero point'}, by {strategy}"
        self.found.note(f"activations stay in bfloat16, not in the checkpoint's {said}", self.name)
        return "float"

    def _spreads(self, strategy: str, size: int | None, kind: str) -> bool:
        """Whether a token's own scales do for what shares one; a note where they are finer.

        They are of the whole token or, beside FP8 weights in groups, of each group of it.
        """
        grouped = kind == "float" and self.group == BLOCK
        own = f"each {BLOCK} values of a token" if grouped else ""
        if strategy == "group":
            return grouped and size == BLOCK
        if strategy == "tensor":
            self.found.note(
                f"activations have a scale for {own or 'each token'}, not one for all tokens of a "
                "batch: what a token gives would depend on the others", self.name,
            )  # fmt: skip
        elif strategy == "token" and grouped:
            self.found.note(f"activations have a scale for {own}, not one for all of it", self.name)
        return strategy in ("tensor", "token")

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    def part(self, part: str) -> str:
        return f"{self.module}.{part}"

    def has(self, part: str) -> bool:
        return self.part(part) in self.names

    def matrix(self, kind: str) -> Matrix:
        own = "weight" if kind in _BYTES else "weight_packed"
        listed = (own, *(p for p in _PARTS if p not in ("weight", "weight_packed")))
        parts = tuple(self.part(p) for p in listed if self.has(p))
        need(self.tensors, self.names, self.module, "weight_scale")
        if self.activations.endswith("_static"):
            need(self.tensors, self.names, self.module, "input_scale")
        if kind in _FLOATS:
            shape, scheme, read = self._nibbles(kind)
        elif self.float:
            shape, scheme, read = self._float8()
        else:
            shape, scheme, read = self._integers(kind)
        if scheme is None:
            self.found.note(
                f"{self.bits} bits with scales for {self.rows or 'all'} rows and "
                f"{self.group or 'all'} columns have no kernel and are widened",
                self.name,
            )
            if self.activations != "float":
                self.found.note("activations stay in bfloat16 beside widened weights", self.name)
        return Matrix(shape, scheme, read, parts)

    def _check_scales(self, n: int, k: int) -> None:
        name, shape = self.part("weight_scale"), scale_shape(n, k, self.group, self.rows)
        flat = ((shape[0],),) if shape[1] == 1 else ()
        check_shape(self.tensors, name, shape, *flat, *(((),) if shape == (1, 1) else ()))

    def _integers(self, kind: str) -> tuple[tuple[int, int], Scheme | None, Callable[[], Any]]:
        packed = kind == "pack-quantized"
        if packed:
            need(self.tensors, self.names, self.module, "weight_packed", "weight_shape")
            check_dtype(self.tensors, self.part("weight_packed"), torch.int32)
            check_shape(self.tensors, self.part("weight_shape"), (2,))
            check_dtype(self.tensors, self.part("weight_shape"), *_WHOLE)
            n, k = (int(v) for v in self.tensors.raw(self.part("weight_shape")).tolist())
            check_shape(self.tensors, self.part("weight_packed"), (n, -(-k * self.bits // 32)))
        else:
            need(self.tensors, self.names, self.module, "weight")
            check_dtype(self.tensors, self.name, torch.int8)
            n, k = matrix_shape(self.tensors, self.name)
        self._check_scales(n, k)
        if not self.symmetric:
            need(self.tensors, self.names, self.module, "weight_zero_point")
            check_dtype(self.tensors, self.part("weight_zero_point"), *_WHOLE)
        scheme = integer_scheme(self.bits, self.group, self.symmetric, self.activations, self.rows)
        if self._column_group(k) is not None:
            scheme = None
            self.found.note("columns aren't in the order of their groups (actorder)", self.name)
        return (n, k), scheme, partial(self._read_integers, n, k, packed, scheme)

    def _column_group(self, k: int) -> Tensor | None:
        """The group of each column, where it isn't its number divided by the group's size."""
        if not self.has("weight_g_idx") or not self.group:
            return None
        check_shape(self.tensors, self.part("weight_g_idx"), (k,))
        of = self.tensors.raw(self.part("weight_g_idx")).long()
        count = groups(k, self.group)
        if int(of.min()) == -1:  # LLM Compressor's for "not used"
            return None
        if int(of.min()) < 0 or int(of.max()) >= count:
            raise WeightsError(
                f"{self.part('weight_g_idx')} names groups {int(of.min())} … {int(of.max())}, but "
                f"{k} columns have {count}."
            )
        return None if torch.equal(of, torch.arange(k) // self.group) else of

    def _read_integers(self, n: int, k: int, packed: bool, scheme: Scheme | None) -> Tensor | Codes:
        count, half = groups(k, self.group), 2 ** (self.bits - 1)
        if packed:
            unsigned = unpack_bits(self.tensors.raw(self.part("weight_packed")), self.bits, k)
        else:
            unsigned = self._unsigned(self.tensors.raw(self.name), half)
        zero: Tensor | None = None
        if not self.symmetric:
            stored = self.tensors.raw(self.part("weight_zero_point"))
            if stored.dtype is torch.int32 and self.rows == 1 and packed:
                check_shape(
                    self.tensors, self.part("weight_zero_point"), (-(-n * self.bits // 32), count)
                )
                zero = unpack_bits(stored.t(), self.bits, n).t().contiguous()
            else:
                zero = spread(self._unsigned(stored, half), n, self.rows)
                if zero.shape != (n, count):
                    raise WeightsError(
                        f"{self.part('weight_zero_point')} has shape {list(stored.shape)}, but "
                        f"[{n}, {k}] has {count} groups in each row."
                    )
        scale = spread(finite(self.tensors, self.part("weight_scale")), n, self.rows)
        of = self._column_group(k)
        matrix = Integers(self.bits, self.group, unsigned, scale, zero, of)
        if scheme is None:
            return matrix.values()
        static = number(self.tensors, self.part("input_scale")) if scheme.static else None
        return matrix.codes(scheme, static)

    def _unsigned(self, stored: Tensor, half: int) -> Tensor:
        raised = stored.long() + half
        if int(raised.min()) < 0 or int(raised.max()) >= 2 * half:
            raise WeightsError(
                f"{self.module} holds {int(raised.min()) - half} … {int(raised.max()) - half}, "
                f"which {self.bits} bits can't: config.json describes another checkpoint."
            )
        return raised.to(torch.uint8)

    def _float8(self) -> tuple[tuple[int, int], Scheme | None, Callable[[], Any]]:
        need(self.tensors, self.names, self.module, "weight")
        check_dtype(self.tensors, self.name, torch.float8_e4m3fn)
        n, k = matrix_shape(self.tensors, self.name)
        self._check_scales(n, k)
        sharing = self.group, self.rows
        scheme = float8_scheme(torch.float8_e4m3fn, *sharing, self.activations)
        scales, inputs = self.part("weight_scale"), self.part("input_scale")
        read = partial(read_float8, self.tensors, self.name, scales, sharing, scheme, inputs)
        return (n, k), scheme, read

    def _nibbles(self, kind: str) -> tuple[tuple[int, int], Scheme | None, Callable[[], Any]]:
        need(self.tensors, self.names, self.module, "weight_packed")
        size = _FLOATS[kind]
        if self.bits != 4 or not self.float or self.group != size or not self.symmetric:
            raise UnsupportedModelError(
                f"{self.module}: {kind} has symmetric groups of {size} values in 4 bits, but its "
                f"config_group says {dict(self.weights)}."
            )
        n, half = matrix_shape(self.tensors, self.part("weight_packed"))
        k = half * 2
        check_dtype(self.tensors, self.part("weight_packed"), torch.uint8)
        check_shape(self.tensors, self.part("weight_scale"), (n, groups(k, size)))
        scheme = Scheme("nvfp4" if size == 16 else "mxfp4", size)
        if size == 16:
            need(self.tensors, self.names, self.module, "weight_global_scale")
        return (n, k), scheme, partial(self._read_nibbles, scheme)

    def _read_nibbles(self, scheme: Scheme) -> Codes:
        values = unpack_nibbles(self.tensors.raw(self.part("weight_packed")))
        if scheme.kind == "mxfp4":
            return Codes(scheme, values, read_exponents(self.tensors, self.part("weight_scale")))
        scale = finite(self.tensors, self.part("weight_scale"))
        whole = number(self.tensors, self.part("weight_global_scale"))
        if whole <= 0:
            raise WeightsError(f"{self.part('weight_global_scale')} is {whole}, not positive.")
        outer = torch.tensor(whole).reciprocal().expand(len(values)).contiguous()
        return Codes(scheme, values, scale, outer=outer)

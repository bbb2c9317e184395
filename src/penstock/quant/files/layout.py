"""What the layouts of quantized checkpoints share: where a matrix is, and checks of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes, groups
from penstock.quant.scheme import GROUPS, Activations, Kind, Scheme

Config = Mapping[str, Any]
"""The `quantization_config` of a `config.json`."""


class Tensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """What its elements are."""
        ...

    def raw(self, name: str) -> Tensor:
        """A tensor, of whatever elements."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """One quantized matrix [N, K] of a checkpoint."""

    shape: tuple[int, int]
    scheme: Scheme | None  # None: no scheme says it; `read` gives its values in float32
    read: Callable[[], Tensor | Codes]
    parts: tuple[str, ...]  # the stored tensors that it is made of


@dataclass(slots=True)
class Found:
    """What a layout finds in a checkpoint."""

    matrices: dict[str, Matrix] = field(default_factory=dict)  # by the name of the weight
    hidden: set[str] = field(default_factory=set)  # tensors that nothing here reads
    notices: dict[str, list[str]] = field(default_factory=dict)  # what is other → of which weights

    def note(self, text: str, name: str) -> None:
        """Remember that `text` is true of `name`."""
        self.notices.setdefault(text, []).append(name)


def modules_with(tensors: Tensors, suffix: str) -> list[str]:
    """The modules that have a tensor called `suffix`."""
    return [n.removesuffix(suffix) for n in tensors.names() if n.endswith(suffix)]


def need(tensors: Tensors, names: set[str], module: str, *parts: str) -> None:
    """Raise where `module` lacks one of `parts`."""
    missing = [part for part in parts if f"{module}.{part}" not in names]
    if missing:
        has = sorted(n for n in names if n.startswith(f"{module}."))
        raise WeightsError(
            f"{module} lacks {', '.join(missing)}: the checkpoint has {', '.join(has)}. "
            "It is incomplete: download or convert it again."
        )


def check_shape(tensors: Tensors, name: str, *allowed: tuple[int, ...]) -> None:
    """Raise where the stored tensor has none of the `allowed` shapes."""
    shape = tensors.shape(name)
    if shape not in allowed:
        want = " or ".join(str(list(each)) for each in dict.fromkeys(allowed))
        raise WeightsError(
            f"{name} has shape {list(shape)}, but its matrix needs {want}. "
            "It is cut off, or config.json describes another checkpoint."
        )


def is_pair(value: Any) -> TypeGuard[Sequence[int]]:
    """Whether a config's value is two sizes, of rows and of columns."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    )


def matrix_shape(tensors: Tensors, name: str) -> tuple[int, int]:
    """Of a stored tensor; WeightsError where it isn't a matrix."""
    shape = tensors.shape(name)
    if len(shape) != 2:
        raise WeightsError(f"{name} has shape {list(shape)}: it isn't a matrix.")
    return shape[0], shape[1]


def check_dtype(tensors: Tensors, name: str, *allowed: torch.dtype) -> None:
    """Raise where the stored tensor has none of the `allowed` elements."""
    dtype = tensors.stored_dtype(name)
    if dtype not in allowed:
        raise WeightsError(f"{name} is {dtype}, not {' or '.join(map(str, allowed))}.")


def finite(tensors: Tensors, name: str) -> Tensor:
    """The stored scales `name` in float32; WeightsError where one isn't a number."""
    stored = tensors.raw(name)
    if not (stored.is_floating_point() or stored.dtype is torch.float8_e8m0fnu):
        raise WeightsError(f"{name} holds scales in {stored.dtype}, which isn't a float.")
    scale = stored.float()
    bad = int((~torch.isfinite(scale)).sum())
    if bad:
        raise WeightsError(
            f"{bad} of the {scale.numel()} scales in {name} aren't finite. "
            "The checkpoint is corrupt: download or convert it again."
        )
    return scale


def number(tensors: Tensors, name: str) -> float:
    """The one scale that `name` holds."""
    check_shape(tensors, name, (), (1,))
    return float(finite(tensors, name).item())


def option(config: Config, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """The one of `allowed` that `key` is (4 for 4.0); UnsupportedModelError for another."""
    value = config.get(key, default)
    if value not in allowed:
        raise UnsupportedModelError(
            f"quantization_config has {key}={value!r}; read are {', '.join(map(repr, allowed))}."
        )
    return allowed[allowed.index(value)]


def integer_scheme(
    bits: int, group: int, symmetric: bool, activations: Activations = "float", rows: int = 1
) -> Scheme | None:
    """The scheme of integer codes; None where their groups or bits aren't built."""
    kind: Kind | None = {4: "int4", 8: "int8"}.get(bits)  # type: ignore[assignment]
    if kind is None or group not in (0, *GROUPS) or rows not in (0, 1):
        return None
    return Scheme(kind, group, symmetric, activations, rows)


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix of unsigned integers, before it becomes `Codes` or values.

    W[n, k] = (unsigned[n, k] − zero[n, g]) · scale[n, g], g = column_group[k] or k // group.
    """

    bits: int
    group: int  # 0: all of a row
    unsigned: Tensor  # [N, K] uint8
    scale: Tensor  # [N, G] float32
    zero: Tensor | None  # [N, G] integers; None: 2^(bits − 1)
    column_group: Tensor | None = None  # [K], where columns aren't in the order of their groups

    def values(self) -> Tensor:
        """[N, K] in float32."""
        k = self.unsigned.shape[1]
        of = self.column_group
        of = torch.arange(k) // (self.group or k) if of is None else of.long()
        zero = 2 ** (self.bits - 1) if self.zero is None else self.zero.float()[:, of]
        return (self.unsigned.float() - zero) * self.scale[:, of]

    def codes(self, scheme: Scheme, input_scale: float | None = None) -> Codes:
        """In `scheme`, whose bits and groups they have."""
        offset, dtype = (128, torch.int8) if self.bits == 8 else (0, torch.uint8)
        values = (self.unsigned ^ 128).view(torch.int8) if offset else self.unsigned
        zero = None if self.zero is None else (self.zero.int() - offset).to(dtype)
        return Codes(scheme, values, self.scale, zero, input_scale=input_scale)


def spread(scale: Tensor, n: int, rows: int) -> Tensor:
    """Scales [ceil(N / rows), G] (rows 0: a single one) repeated for each of N rows."""
    if rows == 0:
        return scale.reshape(1, 1).expand(n, 1).contiguous()
    if rows == 1:
        return scale.reshape(n, -1).contiguous()
    return scale.repeat_interleave(rows, 0)[:n].contiguous()


def shared(name: str, each: Tensor, rows: int) -> Tensor:
    """What `spread` was given; WeightsError where rows that share a scale differ."""
    if rows == 1:
        return each
    step = each.shape[0] if rows == 0 else rows
    first = each[::step]
    if not torch.equal(first.repeat_interleave(step, 0)[: each.shape[0]], each):
        raise WeightsError(
            f"{name}: every {step} rows should share their scales, but some differ. "
            "Quantize it anew, or as one with scales for each row."
        )
    return first.reshape(1) if rows == 0 else first.contiguous()


def scale_shape(n: int, k: int, group: int, rows: int) -> tuple[int, int]:
    """Of stored scales that `rows` rows (0: all) and `group` columns (0: all) share."""
    return (1 if rows == 0 else -(-n // rows), groups(k, group))


def smallest_exact(scale: Tensor) -> Tensor:
    """Scales in float16 or bfloat16 where that changes none of them, else in float32."""
    for dtype in (torch.float16, torch.bfloat16):
        short = scale.to(dtype)
        if torch.equal(short.float(), scale):
            return short
    return scale


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` unsigned integers of each row of int32 words [R, W], lowest bits first."""
    packed = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return packed[:, :count].contiguous()
    if bits == 3:  # they cross words
        single = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        single = single.view(len(packed), -1)[:, : count * 3].reshape(len(packed), count, 3)
        return single[..., 0] | single[..., 1] << 1 | single[..., 2] << 2
    mask = 2**bits - 1
    fields = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, -1).view(len(packed), -1)[:, :count].contiguous()


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [R, C] of 4 or 8 bits as int32 words [R, ceil(C · bits / 32)]."""
    per_word = 32 // bits
    more = -values.shape[1] % per_word
    values = torch.nn.functional.pad(values.to(torch.uint8), (0, more))
    if bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return values.flatten().view(torch.int32).view(len(values), -1)


def pack_nibbles(codes: Tensor, *, low_first: bool = True) -> Tensor:
    """Codes 0 … 15 [R, C], C even, two to a byte [R, C / 2]."""
    first, second = codes[:, 0::2], codes[:, 1::2]
    return first | second << 4 if low_first else second | first << 4


def unpack_nibbles(packed: Tensor, *, low_first: bool = True) -> Tensor:
    """Bytes [R, C / 2] as codes [R, C]."""
    pair = (packed & 15, packed >> 4)
    return torch.stack(pair if low_first else pair[::-1], -1).view(len(packed), -1)


def excluded(module: str, patterns: Iterable[str]) -> str | None:
    """The first of `patterns` that names `module`, a part of its path, or what it lies in."""
    path = f".{module}."
    return next((p for p in patterns if f".{p.strip('.')}." in path), None)


def check_included(module: str, config: Config, *keys: str) -> None:
    """Raise where the config says that `module`, which is quantized, isn't."""
    for key in keys:
        named = config.get(key) or ()
        pattern = excluded(module, (named,) if isinstance(named, str) else named)
        if pattern is not None:
            raise WeightsError(
                f"quantization_config's {key} names {pattern!r}, but {module} is quantized in the "
                "weights. They don't belong together."
            )

"""`Codes`: a quantized matrix in plain rows, as files hold it and methods choose it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.ops.panels import COLUMNS
from penstock.ops.records import BLOCK_BYTES, VALUES, mix, values_of
from penstock.quant.levels import levels
from penstock.quant.scheme import Scheme

_STORED = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "nf4": torch.uint8,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
    "q4_k": torch.uint8,
    "q5_k": torch.uint8,
    "q6_k": torch.uint8,
    "mixed_k": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Codes:
    """W[n, k] = (value(values[n, k]) − zero[n, g]) · scale[n, g] · outer[n], g = k // group.

    A code's value: itself for int8 and fp8; for int4 0 … 15, with a zero point of 8 where it has no
    other; for the rest `quant.levels`. Scales that several rows share are repeated for each.
    Of K-quants values are rows of blocks as ggml has them (`ops.records`), and there is no scale.
    """

    scheme: Scheme
    values: Tensor  # [N, K] int8, float8, or uint8 of 0 … 15; of K-quants [N, bytes] uint8
    scale: Tensor  # [N, G] float32; of K-quants [N, 0]
    zero: Tensor | None = None  # [N, G] int8 or, of int4, uint8; None where symmetric
    outer: Tensor | None = None  # [N] float32, of nvfp4 alone
    input_scale: float | None = None  # of static activations: x ≈ q · input_scale

    def __post_init__(self) -> None:
        n, k = self.shape
        shape = (n, 0 if self.scheme.is_k else groups(k, self.scheme.group))
        stored = _STORED[self.scheme.kind]
        wrong = [
            text
            for text, bad in (
                (f"codes in {self.values.dtype}, not {stored}", self.values.dtype is not stored),
                (f"scales {list(self.scale.shape)}, not {list(shape)}", self.scale.shape != shape),
                (f"scales in {self.scale.dtype}", self.scale.dtype is not torch.float32),
                ("zero points where it is symmetric, or none where it isn't",
                 (self.zero is None) != self.scheme.symmetric),
                (f"zero points {self.zero is not None and list(self.zero.shape)}",
                 self.zero is not None and self.zero.shape != shape),
                ("outer scales", (self.outer is not None) != (self.scheme.kind == "nvfp4")),
                ("a scale of activations, or none",
                 (self.input_scale is not None) != self.scheme.static),
            )
            if bad
        ]  # fmt: skip
        if wrong:
            raise WeightsError(f"A matrix [{n}, {k}] in {self.scheme.name} has {'; '.join(wrong)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        n, k = self.values.shape
        if self.scheme.is_k:
            k = k // BLOCK_BYTES[self.scheme.bits] * VALUES
        return n, k

    def dequantize(self) -> Tensor:
        """The matrix [N, K] that the codes stand for, in float32."""
        if self.scheme.is_k:
            return values_of(self.values, self.scheme.bits)
        (n, k), group = self.shape, self.scheme.group or self.shape[1]
        if self.scheme.kind in ("nf4", "mxfp4", "nvfp4"):
            value = levels(self.scheme.kind)[self.values.long()]
        else:
            value = self.values.float()

        def spread(each: Tensor) -> Tensor:
            return each.float().repeat_interleave(group, 1)[:, :k]

        if self.zero is not None:
            value = value - spread(self.zero)
        elif self.scheme.kind == "int4":
            value = value - 8
        value = value * spread(self.scale)
        return value if self.outer is None else value * self.outer.view(n, 1)

    def rows(self, index: Tensor | slice) -> Codes:
        """Some of the rows, in the order of `index`."""
        return replace(
            self,
            values=self.values[index],
            scale=self.scale[index],
            zero=None if self.zero is None else self.zero[index],
            outer=None if self.outer is None else self.outer[index],
        )

    def mixed(self) -> Codes:
        """A K-quant as part of a mixture of them."""
        scheme = mixture([self.scheme])
        return replace(self, scheme=scheme, values=mix(self.values, self.scheme.bits))

    @staticmethod
    def stack(parts: Sequence[Codes]) -> Codes:
        """The parts one under the other; all of one scheme.

        Of several scales of activations the largest covers all parts. K-quants of several kinds
        become a mixture.
        """
        first = parts[0]
        if len({part.scheme for part in parts}) > 1 and all(part.scheme.is_k for part in parts):
            uneven = [part.shape[0] for part in parts[:-1] if part.shape[0] % COLUMNS]
            if uneven:
                raise WeightsError(
                    f"K-quants of several kinds are stacked by whole {COLUMNS} rows, not {uneven}."
                )
            parts = [part.mixed() for part in parts]
            first = parts[0]
        schemes = sorted({part.scheme.name for part in parts})
        if len(schemes) > 1:
            raise WeightsError(f"Matrices in {', '.join(schemes)} can't be stacked.")
        inputs = [part.input_scale for part in parts if part.input_scale is not None]
        zeros = [part.zero for part in parts if part.zero is not None]
        outers = [part.outer for part in parts if part.outer is not None]
        return Codes(
            first.scheme,
            torch.cat([part.values for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(zeros) if zeros else None,
            torch.cat(outers) if outers else None,
            max(inputs) if inputs else None,
        )


def mixture(schemes: Iterable[Scheme]) -> Scheme:
    """What holds matrices in all of `schemes`, which are K-quants, one under the other."""
    first, *_ = schemes
    return Scheme("mixed_k", VALUES, activations=first.activations)


def groups(k: int, group: int) -> int:
    """How many groups K has; the last one may be shorter."""
    return -(-k // group) if group else 1

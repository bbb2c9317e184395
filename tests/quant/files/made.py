"""Codes with random values and scales, and a checkpoint in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.quant import Codes, Scheme, parse_scheme

SCHEMES = [
    *(f"w{bits}a{acts}{shared}{asym}{static}"
      for bits in (4, 8) for acts in (16, 8)
      for shared in ("-tensor", "-channel", "-g32", "-g64", "-g128")
      for asym in ("", "-asym")
      for static in (("",) if acts == 16 else ("", "-static"))),
    "fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "fp8-e5m2-tensor", "fp8-e5m2-block",
    *(f"fp8-w8a8{shared}{static}" for shared in ("", "-tensor", "-block")
      for static in ("", "-static")),
    "nf4", "nf4-g32", "nf4-g128", "mxfp4", "nvfp4",
]  # fmt: skip


def random_codes(scheme: Scheme | str, n: int, k: int, seed: int = 0) -> Codes:
    """Codes that use every value, with scales that the scheme's files can hold."""
    scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    random = torch.Generator().manual_seed(seed)
    count = -(-k // scheme.group) if scheme.group else 1
    shared = {0: 1, 1: n, 128: -(-n // 128)}[scheme.rows]

    def spread(each: Tensor) -> Tensor:
        step = -(-n // shared)
        return each.repeat_interleave(step if scheme.rows != 128 else 128, 0)[:n].contiguous()

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    scale = torch.rand(shared, count, generator=random) * 0.05 + 0.01
    zero = outer = None
    match scheme.kind:
        case "int4":
            values = integers(0, 16, n, k).to(torch.uint8)
            sign = 1 - 2 * integers(0, 2, shared, count)  # rounding to nearest picks the sign
            scale = spread((scale * (sign if scheme.symmetric else 1)).half().float())
            if not scheme.symmetric:
                zero = spread(integers(0, 16, shared, count).to(torch.uint8))
        case "int8":
            values = integers(-128, 128, n, k).to(torch.int8)
            scale = spread(scale.half().float() if scheme.group else scale)
            if not scheme.symmetric:
                zero = spread(integers(-128, 128, shared, count).to(torch.int8))
        case "fp8_e4m3" | "fp8_e5m2":
            wide = torch.randn(n, k, generator=random) * 30
            e4m3 = scheme.kind == "fp8_e4m3"
            values = wide.to(torch.float8_e4m3fn if e4m3 else torch.float8_e5m2)
            scale = spread(scale)
        case "nf4":
            values, scale = integers(0, 16, n, k).to(torch.uint8), spread(scale.half().float())
        case "mxfp4":
            values = integers(0, 16, n, k).to(torch.uint8)
            scale = torch.ldexp(torch.ones(n, count), integers(-20, 4, n, count))
        case "nvfp4":
            values = integers(0, 16, n, k).to(torch.uint8)
            scale = (scale * 1000).to(torch.float8_e4m3fn).float()
            outer = torch.tensor([1234.567 + seed]).reciprocal().expand(n).contiguous()
    static = 0.037 if scheme.static else None
    rounded = None if static is None else torch.tensor(static).item()
    return Codes(scheme, values, scale, zero, outer, rounded)


def check_same(found: Any, codes: Codes) -> None:
    """Every part of the codes is equal."""
    assert isinstance(found, Codes)
    assert found.scheme == codes.scheme
    assert found.input_scale == codes.input_scale
    for part in ("values", "scale", "zero", "outer"):
        mine, theirs = getattr(codes, part), getattr(found, part)
        assert (mine is None) == (theirs is None), part
        if mine is not None:
            assert mine.dtype == theirs.dtype, part
            assert torch.equal(mine.float(), theirs.float()), part


class Memory:
    """A checkpoint's tensors, from a dictionary."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def raw(self, name: str) -> Tensor:
        return self.tensors[name]

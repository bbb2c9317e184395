"""`linear` in its variants, compiled for Hopper: matrix units, copies ahead of them, registers."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers

WIDE, NARROW = (14336, 4096), (4096, 4096)  # N, K: one span, and four
MATRIX = ("wgmma.mma_async.sync.aligned.m64", "cp.async.c")


def test_few_variants() -> None:
    in_fresh_process(__name__)


@pytest.mark.slow
def test_all_variants() -> None:
    in_fresh_process(__name__, "all")


def matrix(name: str, n: int, k: int, gated: bool) -> tuple[tuple[object, ...], dict[str, object]]:
    """A weight's tensors, of nothing, and what else `linear` is told of it."""
    from penstock.quant import Dense, format_of, parse_scheme
    from penstock.quant.formats.operators import OperatorFormat
    from penstock.quant.formats.storage import ROWS

    rows = n * (1 + gated)
    if name in ("bfloat16", "float32"):
        return (torch.empty(rows, k, dtype=getattr(torch, name)), None, None, None, n), {
            "gated": gated
        }
    fmt = format_of(parse_scheme(name)).stored_as(ROWS)
    assert isinstance(fmt, OperatorFormat) and not isinstance(fmt, Dense)
    small = fmt.pack(torch.randn(1, 128))  # for its dtypes

    def like(tensor: torch.Tensor | None, whole: bool = False) -> torch.Tensor | None:
        if tensor is None:
            return None
        grouped = whole or tensor.shape[1] > 1 or name.endswith(("g128", "g128-asym", "block"))
        return torch.empty(rows, tensor.shape[1] * (k // 128 if grouped else 1), dtype=tensor.dtype)

    weight, scale, zero = like(small["weight"], True), like(small["scale"]), like(small.get("zero"))
    how = {"row_codes": fmt.row_codes, "levels": fmt.levels, "gated": gated}
    return (weight, scale, zero, None, n), how | {"outer": like(small.get("outer"))}


def check(name: str, rows: int, sides: tuple[int, int], gated: bool = False) -> None:
    """Compiles it, and says what it has become."""
    from penstock.kernels.triton.linear import linear

    n, k = sides
    tensors, how = matrix(name, n, k, gated)
    x = torch.empty(rows, k, dtype=torch.float32 if name == "float32" else torch.bfloat16)
    for kernel in compiled(lambda: linear(x, *tensors, **how)):
        if kernel.metadata.name not in ("_linear", "_join"):
            continue
        code, (count, spilled) = kernel.asm["ptx"], registers(kernel)
        what = f"{name} x {rows}, {kernel.metadata.name}{' gated' * gated}"
        print(
            f"{what}: {count} registers, {spilled} bytes spilled, {kernel.metadata.shared} shared"
        )
        if kernel.metadata.name == "_linear" and name != "float32":
            for each in MATRIX:
                assert each in code, f"{what}: no {each}"
        assert kernel.metadata.shared <= 232448, f"{what}: {kernel.metadata.shared} bytes shared"
        few = rows <= 64
        assert spilled <= (0 if few else 1280), f"{what}: {spilled} bytes spilled"


def main(every: bool) -> None:
    check("bfloat16", 1, WIDE, gated=True)
    check("bfloat16", 4096, NARROW)
    check("w4a16-g128", 1, NARROW)
    check("w8a8", 17, NARROW)
    if every:
        names = ["bfloat16", "float32", "w8a16", "w8a8", "w8a8-asym", "w4a16", "w4a16-g128-asym"]
        names += ["w4a8", "w4a8-g128", "fp8", "fp8-e5m2", "fp8-w8a8", "fp8-w8a8-block", "nf4"]
        for name in [*names, "mxfp4", "nvfp4"]:
            for rows in (1, 24, 64, 100, 2048):
                check(name, rows, NARROW)
                check(name, rows, WIDE, gated=True)


if __name__ == "__main__":
    main("all" in sys.argv)

"""Attention, compiled for a GPU by what would start it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers

SHARED_BYTES = 227 * 1024
"""What a block may take of an H100's or H200's shared memory."""


def test_fast_paths() -> None:
    in_fresh_process(__name__)


@pytest.mark.slow
def test_all_paths() -> None:
    in_fresh_process(__name__, "all")


def kernels(dtype: str, stored: str, dim: int, **options: Any) -> Iterator[tuple[str, Any]]:
    """Name and code of the kernels that a step of decoding and of chunks starts."""
    import torch

    from penstock.kernels.triton.attention import attend, sizes

    kind = getattr(torch, dtype)
    blocks, kv_heads, batch = 9, 2, 3
    cache = torch.zeros(blocks, kv_heads, 32, dim).to(getattr(torch, stored))
    scale = torch.zeros(blocks, kv_heads, 32).half() if stored == "int8" else None
    sinks = torch.zeros(8) if options.pop("sinks", False) else None
    start, length = torch.zeros(batch + 1).int(), torch.zeros(batch).int()
    table = torch.zeros(batch, options.pop("width", 64)).int()
    q = torch.zeros(100, 4 * kv_heads, dim).to(kind)
    chosen = {"window": 0, "softcap": 0.0, **options}
    for kernel in compiled(
        lambda: attend(
            q, (cache, cache), (scale, scale), (start, length), table, 1.0,
            sinks=sinks, cut=sizes(kind, dim), **chosen,
        )
    ):  # fmt: skip
        yield kernel.metadata.name, kernel


def check(dtype: str, stored: str, dim: int, **options: Any) -> None:
    """Matrix units, copies that run ahead, sums in one warp; little is spilled."""
    names = []
    for name, kernel in kernels(dtype, stored, dim, **options):
        names.append(name)
        code, (_, spilled) = kernel.asm["ptx"], registers(kernel)
        what = f"{name} {dtype} {stored} {dim} {options}"
        assert kernel.metadata.shared <= SHARED_BYTES, f"{what}: {kernel.metadata.shared} bytes"
        if name == "join_spans":
            assert ("ld.global.v" in code or dim < 64) and spilled == 0, what  # of 32 threads
            continue
        assert "cp.async" in code, f"{what}: copies don't run ahead"
        if dtype == "float32":
            continue
        assert "wgmma.mma_async" in code, f"{what}: not by wgmma"
        assert f"warpsPerCTA = [{kernel.metadata.num_warps}, 1]" in kernel.asm["ttgir"], what
        assert spilled <= (256 if dim <= 128 else 1500), f"{what}: {spilled} bytes spilled"
    assert names == ["few", "join_spans", "many"] or options.get("width") == 8, names


def main(which: str) -> None:
    check("bfloat16", "bfloat16", 128)
    check("bfloat16", "bfloat16", 8, width=8)
    if which != "all":
        check("bfloat16", "int8", 128, width=8)
        return
    every = {"window": 100, "softcap": 30.0, "sinks": True}
    for dim in (8, 64, 72, 128, 256):
        check("bfloat16", "bfloat16", dim)
        for stored in ("bfloat16", "float8_e4m3fn", "int8"):
            check("bfloat16", stored, dim, **every)
    check("bfloat16", "int8", 64, width=8, **every)
    check("float16", "float16", 128)
    for dim in (8, 64):
        check("float32", "float32", dim)


if __name__ == "__main__":
    import sys

    main(sys.argv[1] if len(sys.argv) > 1 else "")

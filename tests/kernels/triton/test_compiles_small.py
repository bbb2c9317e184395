"""Norms, rows and the other small kernels, compiled for a GPU by what would start them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.kernels.triton.norm import layer_norm, rms_norm
from penstock.kernels.triton.rotary_cache import rotary_cache
from penstock.kernels.triton.rows import e4m3_rows, int8_rows
from tests.kernels.triton.compiled import compiled, in_fresh_process, registers


def test_some() -> None:
    in_fresh_process(__name__)


@pytest.mark.slow
def test_all() -> None:
    in_fresh_process(__name__, "--all")


def vectorised(launch: Callable[[], Any], most: int = 64) -> None:
    """The one kernel that is started loads and stores 16 bytes at once, and spills nothing."""
    [kernel] = compiled(launch)
    code, (count, spilled) = kernel.asm["ptx"], registers(kernel)
    name = kernel.metadata.name
    assert "ld.global.v4" in code and "st.global.v" in code, f"{name}: no vectors"
    assert spilled == 0 and count <= most, f"{name}: {count} registers, {spilled} bytes spilled"


def norms_and_rows() -> None:
    x, weight, one = torch.empty(3, 896).bfloat16(), torch.empty(896), torch.empty(1)
    vectorised(lambda: rms_norm(x, weight, 1e-5))
    vectorised(lambda: layer_norm(x, weight, weight, 1e-5))
    vectorised(lambda: int8_rows(x, weight, 1e-5))
    vectorised(lambda: int8_rows(x, None, 0.0, one))
    vectorised(lambda: e4m3_rows(x, weight, 1e-5, 1, 896))
    vectorised(lambda: e4m3_rows(x, None, 0.0, 7, 896))
    odd = torch.empty(3, 25)
    [kernel] = compiled(lambda: rms_norm(odd, weight[:25], 1e-5))
    assert "ld.global.v4" not in kernel.asm["ptx"]  # whatever the row begins on


def rotary(
    dtype: torch.dtype, cache: torch.dtype, norm: int, turned: int, interleaved: bool, copied: bool
) -> None:
    """norm: 0 for none, 1 over each head, 2 over all of them."""
    heads, kv_heads, dim = 8, 4, 128
    x = torch.empty(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [torch.empty(dim * (1, 1, n)[norm]) if norm else None for n in (heads, kv_heads)]
    cos_sin = torch.empty(64, turned) if turned else None
    ids = torch.zeros(3, dtype=torch.int32)
    kv = [torch.empty(2, kv_heads, 16, dim, dtype=cache)] * 2
    if cache is torch.int8:
        kv += [torch.empty(2, kv_heads, 16, dtype=torch.float16)] * 2
    copies = torch.zeros(2, 2, dtype=torch.int32) if copied else None
    vectorised(
        lambda: rotary_cache(
            x, heads, *norms, 1e-5, cos_sin, interleaved, ids, ids, *kv, copies=copies
        )
    )


def rotary_caches(some: bool) -> None:
    rotary(torch.bfloat16, torch.bfloat16, 0, 128, False, False)
    rotary(torch.bfloat16, torch.int8, 1, 128, False, True)
    rotary(torch.float32, torch.float8_e4m3fn, 2, 96, True, False)
    if some:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for cache in (dtype, torch.int8, torch.float8_e4m3fn):
            for norm, turned in itertools.product((0, 1, 2), (0, 64, 128)):
                rotary(dtype, cache, norm, turned, turned == 64 * norm, norm == 1)


if __name__ == "__main__":
    rotary_caches(some="--all" not in sys.argv)
    norms_and_rows()

"""Norms, rows and the other small kernels, compiled for a GPU by what would start them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.kernels.triton.add import add_
from penstock.kernels.triton.embedding import embedding
from penstock.kernels.triton.gate import alternate, gate
from penstock.kernels.triton.gate_by import gate_by_
from penstock.kernels.triton.gate_rows import gate_rows_
from penstock.kernels.triton.kept_rows import keep_rows, kept_rows
from penstock.kernels.triton.mask import mask_
from penstock.kernels.triton.norm import layer_norm, rms_norm
from penstock.kernels.triton.rotary_cache import rotary_cache
from penstock.kernels.triton.rows import e4m3_rows, int8_rows
from penstock.kernels.triton.softcap import softcap_
from penstock.quant import format_of, parse_scheme
from penstock.quant.formats.storage import ROWS
from tests.kernels.triton.compiled import compiled, in_fresh_process, registers

NAMES = (
    *("w8a16-g64", "w8a8-asym", "w4a16-g32", "w4a16-g128-asym", "w4a16-channel"),
    *("fp8", "fp8-block", "fp8-e5m2", "nf4-g64", "mxfp4", "nvfp4"),
)


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


def layouts(launch: Callable[[], Any]) -> list[str]:
    """Where threads hold a kernel's values: what decides over the order of additions.

    Not the places in its source: a kernel that was compiled in another checkout names that one's.
    """
    [kernel] = compiled(launch)
    lines = kernel.asm["ttgir"].splitlines()
    held = [line for line in lines if line.startswith("#") and not line.startswith("#loc")]
    return held + [line for line in lines if 'tt.reduce"' in line]


def tokens_of_any_number_and_place() -> None:
    """The same of the norms of heads."""
    wide, ids = torch.empty(6, 16 * 128 + 3), torch.zeros(6, dtype=torch.int32)
    norm, cos_sin, kv = torch.empty(128), torch.empty(64, 128), torch.empty(2, 4, 16, 128)
    found = [
        layouts(lambda x=x, i=i: rotary_cache(x, 8, norm, norm, 1e-5, cos_sin, False, i, i, kv, kv))
        for x, i in ((wide[:, :-3], ids), (wide[1:2, 3:], ids[1:2]), (wide[:, :-3].clone(), ids))
    ]
    assert found[0] and found.count(found[0]) == 3, found


def rows_of_any_number_and_place() -> None:
    """One row or many, from anywhere in memory: they are summed in the same order."""
    for width in (896, 25):
        whole, weight = torch.empty(6, 2 * width + 3), torch.empty(width)
        plain = whole.flatten()[: 3 * width].view(3, width)
        places = plain, plain[:1], plain[1:2], whole[:, 3 : 3 + width], whole[1:2, :width]
        for call in (
            lambda x, w: rms_norm(x, w, 1e-5),
            lambda x, w: layer_norm(x, w, w, 1e-5),
            lambda x, w: int8_rows(x, w, 1e-5),
            lambda x, w: e4m3_rows(x, w, 1e-5, 1, 896),
        ):
            found = [layouts(lambda x=x, c=call, w=weight: c(x, w)) for x in places]
            assert found[0] and found.count(found[0]) == len(places), (width, found)


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


def elementwise(dtype: torch.dtype) -> None:
    x, y = torch.empty(3, 4096, dtype=dtype), torch.empty(3, 4096, dtype=dtype)
    for activation in (0, 1, 2, 3, 4, 6):
        vectorised(lambda a=activation: gate(x, a, True, 2048))
    for activation in (0, 1, 2, 3, 6):
        vectorised(lambda a=activation: gate(x, a, False, 4096))
    vectorised(lambda: alternate(x.flatten().float()))
    vectorised(lambda: add_(x, y))
    vectorised(lambda: gate_by_(x, y))
    vectorised(lambda: gate_rows_(x, y, torch.empty(4096)))
    vectorised(lambda: softcap_(x.float(), 30.0))
    vectorised(lambda: keep_rows(x, y, 0))
    vectorised(lambda: kept_rows(x[:2, 0], y))
    rows, bits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 128, dtype=torch.int32)
    vectorised(lambda: mask_(x.float(), rows, bits))


def embeddings(names: tuple[str, ...]) -> None:
    tokens, weight = torch.zeros(2, dtype=torch.int32), torch.randn(3, 896)
    for dtype in (torch.float32, torch.bfloat16):
        vectorised(lambda d=dtype: embedding(tokens, weight.to(d), 896))
        vectorised(lambda d=dtype: embedding(tokens, weight.to(d), 896, 2.5))
    for name in names:
        held = format_of(parse_scheme(name)).stored_as(ROWS)
        packed, levels = held.pack(weight), getattr(held, "levels", 0)
        more = packed["scale"], packed.get("zero"), levels, packed.get("outer")
        [kernel] = compiled(lambda p=packed["weight"], m=more: embedding(tokens, p, 896, 2.5, *m))
        assert "st.global.v" in kernel.asm["ptx"] and registers(kernel)[1] == 0, name


if __name__ == "__main__":
    elementwise(torch.bfloat16)
    if "--all" in sys.argv:
        elementwise(torch.float16)
        elementwise(torch.float32)
    embeddings(("w8a16",) if "--all" not in sys.argv else NAMES)
    rotary_caches(some="--all" not in sys.argv)
    norms_and_rows()
    rows_of_any_number_and_place()
    tokens_of_any_number_and_place()

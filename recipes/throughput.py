"""How fast this machine multiplies matrices, and what keeps a training step near it."""

import ctypes
import platform
import time

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_memory() -> bool:
    """Have glibc's allocator keep what is freed; whether it does.

    A training step frees and allocates gigabytes. Handed back to the system, each page is cleared
    and mapped anew at its next use: a step of the 8 M model took 1.36 times as long.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    no_maps, never_trim = libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_…
    return bool(no_maps and never_trim)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def matrix_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measured FLOP/s of a square product in `dtype`: the best of those in so many seconds, since
    other programs may hold most of them up.
    """
    size = 8192 if device.type == "cuda" else 512
    generator = torch.Generator(device).manual_seed(0)
    # random values: products of zeros run faster than real ones
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in "ab")
    best = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or best == float("inf"):
        a @ b
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best

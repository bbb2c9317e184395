"""How fast this machine multiplies matrices: what a training step's speed is stated against."""

import time

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_peak(device: torch.device, dtype: torch.dtype, repeats: int = 10) -> float:
    """Measured FLOP/s of a square product in `dtype`: the best of `repeats`."""
    size = 8192 if device.type == "cuda" else 512
    generator = torch.Generator(device).manual_seed(0)
    # random values: products of zeros run faster than real ones
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in "ab")
    best = float("inf")
    for _ in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        a @ b
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best

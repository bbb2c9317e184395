"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import (
    add,
    embedding,
    gate,
    kept_rows,
    linear,
    mask,
    norm,
    rotary_cache,
    softcap,
)
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = [
    "INTERPRETED",
    "add",
    "embedding",
    "gate",
    "kept_rows",
    "launchers",
    "linear",
    "mask",
    "norm",
    "register",
    "rotary_cache",
    "softcap",
]

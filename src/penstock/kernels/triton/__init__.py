"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import (
    attention,
    norm,
    rotary_cache,
)
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = [
    "INTERPRETED",
    "attention",
    "launchers",
    "norm",
    "register",
    "rotary_cache",
]

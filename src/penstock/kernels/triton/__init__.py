"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import (
    grouped_linear,
    lora,
    norm,
    route,
)
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = ["INTERPRETED", "grouped_linear", "launchers", "lora", "norm", "register", "route"]

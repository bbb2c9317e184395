"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import linear, norm
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = ["INTERPRETED", "launchers", "linear", "norm", "register"]

"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import argmax, draw, norm, top_k, uniforms
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = [
    "INTERPRETED",
    "argmax",
    "draw",
    "launchers",
    "norm",
    "register",
    "top_k",
    "uniforms",
]

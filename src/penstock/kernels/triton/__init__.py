"""The operators in Triton, for NVIDIA GPUs; importing this needs the package `triton`."""

from penstock.kernels.triton import (
    add,
    argmax,
    attention,
    draw,
    embedding,
    gate,
    kept_rows,
    linear,
    mask,
    norm,
    rotary_cache,
    softcap,
    top_k,
    uniforms,
)
from penstock.kernels.triton.launch import INTERPRETED, launchers, register

__all__ = [
    "INTERPRETED",
    "add",
    "argmax",
    "attention",
    "draw",
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
    "top_k",
    "uniforms",
]

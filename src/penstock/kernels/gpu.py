"""Triton's kernels: when they run, and why they can't.

They run on CUDA tensors. With PENSTOCK_KERNELS=triton they run on CPU tensors, interpreted, for
tests: then every operator that has one takes it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from penstock.errors import KernelError

WORKSPACE = 512 << 20
"""The most bytes that attention's spans of few queries take before they are joined."""

LEAST_CAPABILITY = (9, 0)
"""Of a GPU: Hopper's, for whose matrix units the kernels are written, with each row in one warp.
Before it warps share a row's keys, differently for few queries and for many: a sequence's bits
would depend on its company. Codes of four bits wouldn't compile at all.
"""

LEAST_SHARED_BYTES = 227 * 1024
"""That a block may take, which the largest tiles do: consumer Blackwell has 99 KiB."""


def interpreting() -> bool:
    """Whether CPU tensors go to Triton's kernels. Raises KernelError where that can't be."""
    if os.environ.get("PENSTOCK_KERNELS") != "triton":
        return False
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(
            "PENSTOCK_KERNELS=triton runs Triton's kernels on CPU tensors, which its interpreter "
            "alone can: set TRITON_INTERPRET=1 too. On a GPU they run without either."
        )
    return True


def why_not_on(device: torch.device) -> str | None:
    """Why models can't run on that GPU; None: they can."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA: install one that was built "
            "with it"
        )
    if not torch.cuda.is_available():
        return (
            "torch finds no NVIDIA GPU with a driver that works (nvidia-smi shows what the system "
            "sees)"
        )
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        known = ", ".join(f"cuda:{i}" for i in range(count))
        return f"there is no GPU {index}: this machine has {known}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {have}, but the kernels "
            f"need {need} (Hopper: H100, H200, or later)"
        )
    properties: Any = torch.cuda.get_device_properties(device)  # whose types leave some out
    shared = properties.shared_memory_per_block_optin
    if shared < LEAST_SHARED_BYTES:
        return (
            f"{torch.cuda.get_device_name(device)} has {shared >> 10} KiB of shared memory for a "
            f"block, but the kernels need {LEAST_SHARED_BYTES >> 10}, which GPUs for data centers "
            "have (H100, H200)"
        )
    if importlib.util.find_spec("triton") is None:
        return "the kernels are written in Triton, which isn't installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 interprets the kernels, which is for tests on a CPU: unset it"
    return None


def use_triton(device: torch.device) -> None:
    """Have the dispatcher choose Triton's kernels for tensors there. Raises KernelError."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError("Triton isn't installed: pip install triton.")
    from penstock.kernels import triton  # takes half a second, and a GPU to be of use

    triton.register("CUDA" if device.type == "cuda" else "CPU")

"""What a GPU's errors mean: too little memory ends a request or a load, others the engine."""

from __future__ import annotations

import pytest
import torch

from penstock.config import ModelConfig
from penstock.errors import OutOfCacheError
from penstock.runtime.device import CPU, Device, is_fatal, lacks_memory
from penstock.runtime.forwards import _room_on, workspace_bytes

LACKS = [
    torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
BY_TRITON = Device(torch.device("cpu"), by_triton=True)


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_too_little_memory_is_not_fatal_and_says_the_way_out(error: Exception) -> None:
    assert lacks_memory(error) and not is_fatal(error)
    with pytest.raises(OutOfCacheError, match="Lower memory_fraction"), _room_on(BY_TRITON):
        raise error


def test_other_errors_are_what_they_were() -> None:
    illegal = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)
    assert is_fatal(illegal) and not lacks_memory(illegal)
    assert not is_fatal(ValueError("out of memory")) and not lacks_memory(ValueError("out of"))
    with pytest.raises(torch.AcceleratorError, match="illegal"), _room_on(BY_TRITON):
        raise illegal


def test_graphs_keep_a_workspace_of_their_own() -> None:
    once = BY_TRITON.workspace_bytes
    assert once and not CPU.workspace_bytes
    assert workspace_bytes(BY_TRITON, ModelConfig("m")) == 2 * once
    assert workspace_bytes(BY_TRITON, ModelConfig("m", enforce_eager=True)) == once

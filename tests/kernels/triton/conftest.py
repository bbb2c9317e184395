"""Triton's kernels are tested in its interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found

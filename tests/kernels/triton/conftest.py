"""Triton's kernels are tested in its interpreter, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops

pytest.importorskip("triton", reason="Triton isn't installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def reference(name: str) -> Callable[..., Any]:
    """An operator's, on a CPU: a GPU's `topk` puts NaN and equals elsewhere, its sums have another
    order, and it divides by a number as it multiplies by its reciprocal."""

    def there(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(there(one) for one in x)
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    def here(x: Any) -> Any:
        return x.cpu() if isinstance(x, Tensor) else x

    def run(*given: Any, **named: Any) -> Any:
        local = {name: here(x) for name, x in named.items()}
        return there(ops.op(name).reference(*map(here, given), **local))

    return run

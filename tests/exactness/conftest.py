from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """So that kernels share their work out."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels import native


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """So that kernels share their work out."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, selected."""
    before = native.isa
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.kernels import native


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, selected."""
    before = native.isa
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)
